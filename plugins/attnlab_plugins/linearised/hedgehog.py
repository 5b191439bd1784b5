"""Hedgehog: a learned map whose features mimic the softmax's spikes [Zhang et al. 2024]. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor


def hedgehog(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[softmax(W x + b), softmax(-(W x + b))]`, softmax over features: `[B, H, L, 2D]` of `x [B, H, L, D]`.

    weight `[H, D, D]`, bias `[H, D]`. Without autocast, and in the dtype of x.
    """
    z = x @ weight.to(x.dtype).mT + bias.to(x.dtype)[:, None]  # [B, H, L, D]
    return torch.cat([torch.softmax(z, -1), torch.softmax(-z, -1)], -1)
