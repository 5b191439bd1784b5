"""Steps that several definitions share. Needs torch; imported by attnlab.formulas only.

Notation: b batch, h query head, i query, j key, d width. Hidden pairs take no part: neither their
contents nor the gradients of their contents may matter, NaN and Inf included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Positions = tuple[Tensor, Tensor]


def per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values `[B, Hkv, ...]` as each query head reads them, `[B, Hq, ...]`.

    Query head h reads key/value head h // (Hq // Hkv).
    """
    group = num_heads // x.shape[1]
    return x[:, [h // group for h in range(num_heads)]]


def without_absent(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with zeros where a query sees nothing and where a key is seen by no query."""
    sees = visible.any(dim=-1, keepdim=True)  # [B, H, Lq, 1]
    shown_pairs = visible.any(dim=-2).unsqueeze(-1)  # [B, H, Lk, 1]
    return torch.where(sees, query, 0), torch.where(shown_pairs, key, 0), torch.where(shown_pairs, value, 0)


def pair_products(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """sum_d query[i, d] * key[j, d] for the visible pairs: `[B, H, Lq, Lk]`.

    One matrix product where everything is finite; otherwise pair by pair, so that a NaN in a hidden
    pair reaches neither the result nor, as 0 * NaN, a gradient.
    """
    if bool(query.isfinite().all()) and bool(key.isfinite().all()):
        return query @ key.transpose(-1, -2)
    pair = visible.unsqueeze(-1)  # [B, H, Lq, Lk, 1]
    q = torch.where(pair, query.unsqueeze(-2), 0)  # [B, H, Lq, Lk, D]
    k = torch.where(pair, key.unsqueeze(-3), 0)
    return (q * k).sum(dim=-1)


def mix(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """sum_j weights[i, j] * value[j] over the visible keys: `[B, H, Lq, Dv]`."""
    if bool(value.isfinite().all()):
        return weights @ value
    v = torch.where(visible.unsqueeze(-1), value.unsqueeze(-3), 0)  # [B, H, Lq, Lk, Dv]
    return (weights.unsqueeze(-1) * v).sum(dim=-2)


def softmax_attention(
    scores: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    scale: float | Tensor,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    positions: Positions | None = None,
) -> dict[str, Tensor]:
    """scores -> * scale -> softcap -> score_mod -> + bias -> hide -> normalise -> @ value.

    The order is that of ONNX Attention-25. scores `[B, H, Lq, Lk]`, value `[B, H, Lk, Dv]`. A pair whose
    score became -inf is hidden too. A row that sees nothing: out 0, weights 0, lse -inf.
    """
    batch, heads, queries, keys = scores.shape
    s = scores * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if score_mod is not None:
        if positions is None:
            raise ValueError("softmax_attention: score_mod needs positions=(query_positions, key_positions)")
        b = torch.arange(batch, device=s.device).view(batch, 1, 1, 1)
        h = torch.arange(heads, device=s.device).view(1, heads, 1, 1)
        q, k = positions[0].view(batch, 1, queries, 1), positions[1].view(batch, 1, 1, keys)
        s = score_mod(s, b, h, q, k).to(scores.dtype).expand_as(scores)
    if bias is not None:
        s = s + bias.to(s.dtype)
    visible = visible & (s != -torch.inf)
    sees = visible.any(dim=-1, keepdim=True)  # [B, H, Lq, 1]

    # exp(s - top) / sum exp(s - top): top cancels, it only keeps exp in range.
    s = torch.where(visible, s, -torch.inf)
    top = s.detach().amax(dim=-1, keepdim=True) if keys else s.new_zeros(batch, heads, queries, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach().to(s.dtype).view(1, heads, 1, 1))
    top = torch.where(top.isfinite(), top, 0)
    e = torch.where(visible, torch.exp(torch.where(visible, s, 0) - top), 0)
    total = e.sum(dim=-1, keepdim=True)  # [B, H, Lq, 1]
    if sinks is not None:
        total = total + torch.exp(sinks.to(s.dtype).view(1, heads, 1, 1) - top)
    total = torch.where(sees, total, 1)
    weights = e / total
    lse = torch.where(sees, top + torch.log(total), -torch.inf).squeeze(-1)  # [B, H, Lq]
    return {"out": mix(weights, value, visible), "weights": weights, "lse": lse}
