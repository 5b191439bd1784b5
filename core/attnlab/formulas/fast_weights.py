"""Fast weight programmers: a memory S [Dk, Dv] that keys write to and queries read. Needs torch.

Sources: Schmidhuber 1992 (fast_weights); Schlag, Irie and Schmidhuber 2021, eq. 24 and 25 (delta_rule; Widrow and Hoff
1960); Yang et al. 2024, "Gated Linear Attention Transformers", eq. 3 (gated), and "Gated Delta Networks", eq. 10 (gated_delta),
laid out as ONNX LinearAttention-27 does:

    fast_weights   S_t = S_{t-1} + k_t (x) v_t
    delta_rule     S_t = S_{t-1} + beta_t k_t (x) (v_t - S_{t-1}^T k_t)
    gated          S_t = diag(e^{g_t}) S_{t-1} + k_t (x) v_t
    gated_delta    the delta rule upon diag(e^{g_t}) S_{t-1}: first it fades, then it corrects

    o_i = scale * S^T q_i

S is read after the last key that query i sees. Keys that it does not see leave its S unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import Positions, ScoreMod, per_query_head, without_absent


def _fast_weights(
    formula: str,
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

    `gates["beta"]` is `[B, Hkv, Lk]`, `gates["log_decay"]` that or `[B, Hkv, Lk, Dk]`; without them beta is 1 and nothing fades, but
    for `options["decay"] == "retention"`, where head h of Hkv fades by 1 - 2^(-5 - h) a token (Sun et al. 2023, eq. 8). The arguments
    of score formulas are a `ValueError`.
    """
    for name, inputs in (("bias", bias), ("softcap", softcap), ("score_mod", score_mod), ("sinks", sinks)):
        if inputs is not None:
            raise ValueError(f"{formula}: {name} is no part of this formula")
    batch, heads, queries, _ = query.shape
    gates = gates or {}
    beta = gates.get("beta", key.new_ones(key.shape[:3]))
    fading = gates.get("log_decay", key.new_zeros(key.shape[:3]))
    if options.get("decay") == "retention":
        kept = [1 - 2.0 ** (-5 - h) for h in range(key.shape[1])]
        fading = key.new_tensor(kept).log()[:, None].expand(key.shape[:3])
    fading = fading if fading.dim() == 4 else fading[..., None].expand(key.shape)
    key, value, beta, fading = (per_query_head(x, heads) for x in (key, value, beta, fading))
    query, key, value = without_absent(query, key, value, visible)

    state = key.new_zeros(batch, heads, queries, key.shape[-1], value.shape[-1])  # S, one per query
    for t in range(key.shape[-2]):
        applies = visible[..., t].unsqueeze(-1)  # [B, H, Lq, 1]
        k = torch.where(applies, key[:, :, t].unsqueeze(-2), 0)  # [B, H, Lq, Dk]
        v = torch.where(applies, value[:, :, t].unsqueeze(-2), 0)  # [B, H, Lq, Dv]
        rate = torch.where(applies, beta[:, :, t, None, None], 0)  # [B, H, Lq, 1]
        g = torch.where(applies, fading[:, :, t].unsqueeze(-2), 0)  # [B, H, Lq, Dk]
        state = torch.exp(g).unsqueeze(-1) * state
        if formula in ("delta_rule", "gated_delta"):
            v = v - torch.einsum("bhide,bhid->bhie", state, k)  # less what is recalled, S^T k
        state = state + torch.einsum("bhid,bhie->bhide", k, rate * v)
    read = torch.einsum("bhide,bhid->bhie", state, query)
    return {"out": read * (key.shape[-1] ** -0.5 if scale is None else scale)}


fast_weights = partial(_fast_weights, "fast_weights")
delta_rule = partial(_fast_weights, "delta_rule")
gated = partial(_fast_weights, "gated")
gated_delta = partial(_fast_weights, "gated_delta")
