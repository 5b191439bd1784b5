"""Multiplicative attention and its siblings. Needs torch.

Source: Luong, Pham and Manning 2015, "Effective Approaches to Attention-based Neural Machine
Translation", section 3.1 (eq. 8 and the location form), per head:

    dot:       q^T k
    general:   q^T W_a k                    W_a [H, Dq, Dk]
    concat:    v_a^T tanh(W_a [q; k])       W_a [H, A, Dq + Dk], v_a [H, A]
    location:  (W_a q)_j                    W_a [H, max_length, Dq]; j is the key's position

No form divides by the root of the width. Parameters are indexed by query head. Section 3.2, which keys a query reads:

    global:    all
    local-m:   positions p - D .. p + D around the query's own position p
    local-p:   positions within D of p_t = first + S sigmoid(v_p^T tanh(W_p q)), where first is the position of the first key
               that the query may see and S = last - first + 1; weights times exp(-(j - p_t)^2 / (2 (D / 2)^2)), not
               normalised again (eq. 9 and 10).        W_p [H, A, Dq], v_p [H, A]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import (
    Positions,
    ScoreMod,
    mix,
    pair_products,
    per_query_head,
    softmax_attention,
    without_absent,
)


def multiplicative(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    options: Mapping[str, Any],
    scale: float | Tensor | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    gates: Mapping[str, Tensor] | None = None,
    positions: Positions | None = None,
) -> dict[str, Tensor]:
    """softmax(score(q_i, k_j) * scale) over the visible keys, times value. Default scale: 1.

    `options["score"]` is dot, general (where none is named), concat or location; `options["local"]` None, m or p,
    with `options["half_width"]` D.
    """
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    form = options.get("score", "general")
    if form == "dot":
        scores = pair_products(query, key, visible)
    elif form == "general":
        scores = pair_products(torch.einsum("hde,bhid->bhie", parameters["W_a"], query), key, visible)
    elif form == "concat":
        scores = _concat(query, key, visible, parameters["W_a"], parameters["v_a"])
    elif form == "location":
        if positions is None:
            raise ValueError("multiplicative: the location form needs positions=(query_positions, key_positions)")
        scores = _location(query, parameters["W_a"], positions[1], key.shape[-2])
    else:
        raise ValueError(f"multiplicative: score must be dot, general, concat or location, got {form!r}")
    centre = None
    if (local := options.get("local")) is not None:
        if positions is None:
            raise ValueError(f"multiplicative: local-{local} needs positions=(query_positions, key_positions)")
        j, half = positions[1][:, None, None, :], options["half_width"]
        if local == "m":
            visible = visible & ((j - positions[0][:, None, :, None]).abs() <= half)
        else:
            shown = visible if bias is None else visible & (bias != -torch.inf)
            centre = _centre(query, shown, j, parameters["W_p"], parameters["v_p"])  # [B, H, Lq, 1]
            visible = visible & ((j - centre).abs() <= half)
    result = softmax_attention(
        scores,
        value,
        visible=visible,
        scale=1.0 if scale is None else scale,
        softcap=softcap,
        score_mod=score_mod,
        bias=bias,
        sinks=sinks,
        positions=positions,
    )
    if centre is not None:
        gauss = torch.exp(-((j - centre) ** 2) / (2 * (half / 2) ** 2))
        result["weights"] = result["weights"] * gauss
        result["out"] = mix(result["weights"], value, visible)
    return result


def _centre(query: Tensor, visible: Tensor, j: Tensor, w_p: Tensor, v_p: Tensor) -> Tensor:
    j = j.expand_as(visible)
    if not j.shape[-1]:  # no key to point at
        return query.new_zeros(*query.shape[:-1], 1)
    first = torch.where(visible, j, j.shape[-1]).amin(-1, keepdim=True)
    last = torch.where(visible, j, -1).amax(-1, keepdim=True)
    inside = torch.tanh(torch.einsum("had,bhid->bhia", w_p, query))
    share = torch.sigmoid(torch.einsum("ha,bhia->bhi", v_p, inside)).unsqueeze(-1)
    return first + (last - first + 1) * share


def _concat(query: Tensor, key: Tensor, visible: Tensor, w_a: Tensor, v_a: Tensor) -> Tensor:
    pair = visible.unsqueeze(-1)  # [B, H, Lq, Lk, 1]
    q = torch.where(pair, query.unsqueeze(-2), 0)  # [B, H, Lq, Lk, Dq]
    k = torch.where(pair, key.unsqueeze(-3), 0)  # [B, H, Lq, Lk, Dk]
    inside = torch.einsum("hae,bhije->bhija", w_a, torch.cat([q, k], dim=-1))
    return torch.einsum("ha,bhija->bhij", v_a, torch.tanh(inside))


def _location(query: Tensor, w_a: Tensor, key_positions: Tensor, keys: int) -> Tensor:
    by_position = torch.einsum("hpd,bhid->bhip", w_a, query)  # [B, H, Lq, max_length]
    batch, heads, queries, _ = by_position.shape
    index = key_positions.clamp(min=0)  # padding on the left stands before position 0, and is hidden
    index = index.view(batch, 1, 1, keys).expand(batch, heads, queries, keys)
    return by_position.gather(-1, index)
