"""Substitutes for a missing definition: a family's formula, dense, around the variant's own methods. Needs torch.

They test everything around the author's method (masks, heads, state, gradients, dtypes) and nothing in it: a
wrong feature map agrees with it. That is why a variant without a definition is reported as "formula unverified".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.families.feature_map import FeatureMapAttention
from attnlab.families.recurrence import RecurrentAttention
from attnlab.families.score import ScoreAttention
from attnlab.formulas._parts import mix, pair_products, per_query_head, softmax_attention, without_absent

Definition = Callable[..., dict[str, Tensor]]


def machinery_of(variant: Any) -> Definition | None:
    """A definition made of the variant's own methods, or None where its family has no formula to put them in."""
    kind = type(variant)
    for family, define in (
        (ScoreAttention, _score),
        (FeatureMapAttention, _feature_map),
        (RecurrentAttention, _recurrent),
    ):
        if isinstance(variant, family):
            return partial(define, variant) if kind.attend is family.attend else None
    return None


class _Methods(nn.Module):
    """Calls methods of a copy of the variant with given parameters, which may be leaves of a graph."""

    def __init__(self, variant: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.variant = copy.deepcopy(variant).to(device, dtype)

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.variant, method)(*args, **kwargs)


def _methods(variant: Any, like: Tensor, parameters: Mapping[str, Tensor]) -> Callable[..., Any]:
    module = _Methods(variant, like.dtype, like.device)
    named = {f"variant.{name}": x for name, x in parameters.items()}

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, named, (method, *args), kwargs)

    return call


def _score(
    variant: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    scale: float | None,
    positions: tuple[Tensor, Tensor],
    softcap: float | None = None,
    score_mod: Any = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> dict[str, Tensor]:
    ask = _methods(variant, query, parameters)
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    where = {"query_positions": positions[0], "key_positions": positions[1]}
    scores = ask("scores", ask("project_query", query), ask("project_key", key), **where)
    if scale is None:
        scale = variant.default_scale()
    answer = softmax_attention(
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
    factor = ask("reweight", ask("project_query", query), **where)
    if factor is None:
        return answer
    weights = torch.where(visible, answer["weights"] * factor, 0)
    return {"out": mix(weights, value, visible), "weights": weights, "lse": answer["lse"]}


def _feature_map(
    variant: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    scale: float | None,
    positions: tuple[Tensor, Tensor],
    **others: Any,
) -> dict[str, Tensor]:
    ask = _methods(variant, query, parameters)
    heads = query.shape[1]
    padding = ~visible.any(dim=2).any(dim=1)[:, None, :, None]  # [B, 1, Lk, 1], whatever the head
    key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
    phi_q = ask("feature_map", query, role="query", positions=positions[0])
    phi_k = per_query_head(ask("feature_map", key, role="key", positions=positions[1]), heads)
    value = per_query_head(value, heads)
    products = torch.where(visible, pair_products(phi_q, phi_k, visible), 0)
    if variant.normalise:
        total = products.sum(dim=-1, keepdim=True)
        products = products / torch.where(total == 0, 1, total)
    if scale is None:
        scale = variant.default_scale()
    weights = products if scale is None else products * scale
    return {"out": mix(weights, value, visible), "weights": weights}


def _recurrent(
    variant: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    scale: float | None,
    gates: Mapping[str, Tensor] | None = None,
    **others: Any,
) -> dict[str, Tensor]:
    ask = _methods(variant, query, parameters)
    batch, heads, queries, width = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    # One memory for each query: queries join the batch, and each walks over the keys that it sees.
    by_row = visible[:, ::group].transpose(1, 2).flatten(0, 1)  # [B * Lq, Hkv, Lk]

    def by_query(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, queries, *x.shape[1:]).flatten(0, 1)

    key, value = by_query(key), by_query(value)
    rates = {name: by_query(gate) for name, gate in (gates or {}).items()}
    memory = key.new_zeros(batch * queries, kv_heads, key.shape[-1], value.shape[-1])
    for t in range(key.shape[2]):
        present = by_row[..., t]
        k, v = (torch.where(present[..., None], x[:, :, t], 0) for x in (key, value))
        now = {n: g[:, :, t] for n, g in rates.items()}
        after = ask("update", memory, k, v, now)
        memory = torch.where(present[..., None, None], after, memory)
    q = query.transpose(1, 2).reshape(batch * queries, kv_heads, group, 1, width)
    out = ask("read", memory, q).reshape(batch, queries, heads, value.shape[-1]).transpose(1, 2)
    if scale is None:
        scale = variant.default_scale()
    return {"out": out if scale is None else out * scale}
