"""Scaled dot product. Needs torch.

Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1:

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnlab.formulas._parts import (
    Positions,
    ScoreMod,
    pair_products,
    per_query_head,
    softmax_attention,
    without_absent,
)


def softmax_dot_product(
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
    """softmax(q_i^T k_j * scale) over the visible keys, times value. Default scale: Dk^-0.5."""
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    return softmax_attention(
        pair_products(query, key, visible),
        value,
        visible=visible,
        scale=key.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        score_mod=score_mod,
        bias=bias,
        sinks=sinks,
        positions=positions,
    )
