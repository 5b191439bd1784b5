"""Feature maps whose kernel is a polynomial: Taylor, DPFP, and one plus the cosine. Needs torch.

Shapes: `x [B, H, L, D]` in float32 or better, features `[B, H, L, P]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def taylor(x: Tensor) -> Tensor:
    """`[1, x', (x' (x) x') / sqrt(2)]`, `x' = x / D^(1/4)`, P = 1 + D + D^2: the kernel is `1 + s + s^2 / 2`, s = q^T k / sqrt(D)."""
    x = x * x.shape[-1] ** -0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)  # [B, H, L, D^2]
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs * math.sqrt(0.5)], -1)


def dpfp(x: Tensor, nu: int) -> Tensor:
    """`r * roll(r, i)` for i = 1 .. nu, with `r = [relu(x), relu(-x)]`, P = 2 D nu."""
    r = torch.relu(torch.cat([x, -x], -1))  # [B, H, L, 2D]
    return torch.cat([r * r.roll(i, -1) for i in range(1, nu + 1)], -1)


def cosine(x: Tensor) -> Tensor:
    """`[1, x / |x|]`, P = 1 + D: the kernel is `1 + cos(q, k)`. A vector of zeros has no direction: its cosines are 0."""
    size = (
        x.detach().abs().amax(-1, keepdim=True)
    )  # a factor that leaves directions alone and squares in range
    x = x / size.masked_fill(size == 0, 1)
    square = x.square().sum(-1, keepdim=True)
    nowhere = square == 0
    direction = (x * square.masked_fill(nowhere, 1).rsqrt()).masked_fill(nowhere, 0)
    return torch.cat([torch.ones_like(size), direction], -1)
