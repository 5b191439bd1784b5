"""The delta rule. Needs torch.

Source: Schlag, Irie and Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers",
eq. 24 and 25 (Widrow and Hoff 1960), with S [Dk, Dv] as ONNX LinearAttention-27 lays it out:

    S_t = S_{t-1} + beta_t k_t (x) (v_t - S_{t-1}^T k_t),      o_i = scale * S^T q_i

S is read after the last key that query i sees. Keys that it does not see leave its S unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import Positions, ScoreMod, per_query_head, without_absent


def delta_rule(
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
    """Each query runs the recurrence over its own visible keys, in order, and reads. Default scale: Dk^-0.5.

    `gates["beta"]` is `[B, Hkv, Lk]`; without it beta is 1. The arguments of score formulas are a `ValueError`.
    """
    for name, given in (("bias", bias), ("softcap", softcap), ("score_mod", score_mod), ("sinks", sinks)):
        if given is not None:
            raise ValueError(f"delta_rule: {name} is no part of this formula")
    batch, heads, queries, _ = query.shape
    beta = key.new_ones(key.shape[:3]) if gates is None else gates["beta"]
    key, value, beta = (per_query_head(x, heads) for x in (key, value, beta))
    query, key, value = without_absent(query, key, value, visible)

    state = key.new_zeros(batch, heads, queries, key.shape[-1], value.shape[-1])  # S, one per query
    for t in range(key.shape[-2]):
        applies = visible[..., t].unsqueeze(-1)  # [B, H, Lq, 1]
        k = torch.where(applies, key[:, :, t].unsqueeze(-2), 0)  # [B, H, Lq, Dk]
        v = torch.where(applies, value[:, :, t].unsqueeze(-2), 0)  # [B, H, Lq, Dv]
        rate = torch.where(applies, beta[:, :, t, None, None], 0)  # [B, H, Lq, 1]
        recalled = torch.einsum("bhide,bhid->bhie", state, k)  # S^T k
        state = state + torch.einsum("bhid,bhie->bhide", k, rate * (v - recalled))
    read = torch.einsum("bhide,bhid->bhie", state, query)
    return {"out": read * (key.shape[-1] ** -0.5 if scale is None else scale)}
