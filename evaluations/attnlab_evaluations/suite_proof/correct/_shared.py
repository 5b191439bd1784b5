"""What the unusual variants share: dense products for their implementations, plain steps for their definitions. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import Attention, Call
from attnlab.engines import accumulation_dtype, expand_heads

# -- for implementations ----------------------------------------------------------------------------------------


def widened(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in float32 or better, keys and values repeated for their query heads."""
    wide, heads = accumulation_dtype(query.dtype), query.shape[1]
    return query.to(wide), expand_heads(key, heads).to(wide), expand_heads(value, heads).to(wide)


def scale_of(variant: Attention, call: Call) -> float:
    """The caller's scale, or the formula's own."""
    scale = variant.default_scale() if call.scale is None else call.scale
    return 1.0 if scale is None else scale


def hidden_scores(scores: Tensor, call: Call) -> Tensor:
    """`scores [B, Hq, Lq, Lk]` plus the bias, -inf where the query may not see the key."""
    if call.bias is not None:
        scores = scores + call.bias.to(scores.dtype)
    visibility = call.visibility
    return scores if visibility is None else scores.masked_fill(~visibility.dense(), -torch.inf)


def dropped(weights: Tensor, call: Call) -> Tensor:
    """Weights after dropout, where the call asks for it."""
    return torch.nn.functional.dropout(weights, call.dropout_p) if call.dropout_p else weights


# -- for definitions --------------------------------------------------------------------------------------------


def each_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values `[B, Hkv, ...]` as each query head reads them: head h reads h // (Hq // Hkv)."""
    group = heads // x.shape[1]
    return torch.stack([x[:, h // group] for h in range(heads)], dim=1)


def products(query: Tensor, key: Tensor, *, visible: Tensor, bias: Tensor | None, scale: float) -> Any:
    """`scale q_i^T k_j + bias` `[B, H, Lq, Lk]`, and the visible pairs that no -inf hides."""
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scale
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    visible = visible & (scores != -torch.inf)
    return torch.where(visible, scores, 0), visible


def softmax_rows(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse of softmax over the visible keys; 0 and -inf in rows that see nothing."""
    top = torch.where(visible, scores, -torch.inf).detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    e = torch.where(visible, torch.exp(torch.where(visible, scores, top) - top), 0)
    total, sees = e.sum(-1, keepdim=True), visible.any(-1, keepdim=True)
    total = torch.where(sees, total, 1)
    return e / total, torch.where(sees, top + torch.log(total), -torch.inf)[..., 0]
