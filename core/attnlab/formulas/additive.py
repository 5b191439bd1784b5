"""Additive attention. Needs torch.

Source: Bahdanau, Cho and Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and
Translate", appendix A.1.2 (the alignment model), per head:

    a(q, k) = v^T tanh(W_q q + W_k k)

Parameters: `W_q` [H, A, Dq], `W_k` [H, A, Dk], `v` [H, A], all indexed by query head; with a first axis of 1, shared by
the heads. Options: `bias` adds `b` [H, A] inside tanh, and `weight_norm` makes the vector `g v / |v|` with a number `g` [H]
(Salimans and Kingma 2016, "Weight Normalization", eq. 2); an option that is absent is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import Positions, ScoreMod, per_query_head, softmax_attention, without_absent


def additive(
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
    """softmax(v^T tanh(W_q q_i + W_k k_j) * scale) over the visible keys, times value. Default scale: 1."""
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    w_q, w_k, v = (parameters[n].expand(heads, *parameters[n].shape[1:]) for n in ("W_q", "W_k", "v"))
    if options.get("weight_norm"):
        v = parameters["g"].unsqueeze(-1) * v / v.square().sum(-1, keepdim=True).sqrt()
    projected_query = torch.einsum("had,bhid->bhia", w_q, query)
    projected_key = torch.einsum("had,bhjd->bhja", w_k, key)
    if options.get("bias"):
        projected_query = projected_query + parameters["b"].unsqueeze(-2)  # [H, 1, A]
    inside = projected_query.unsqueeze(-2) + projected_key.unsqueeze(-3)  # [B, H, Lq, Lk, A]
    inside = torch.where(visible.unsqueeze(-1), inside, 0)
    scores = torch.einsum("ha,bhija->bhij", v, torch.tanh(inside))
    return softmax_attention(
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
