"""Feature maps whose kernel is a polynomial: Taylor, DPFP, and one plus the cosine. Needs torch.

Shapes: `x [B, H, L, D]` in float32 or better, features `[B, H, L, P]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlab.engines import unit_length


def in_range(x: Tensor) -> Tensor:
    """x held to 10^9 (float64: 10^90), so that sums of its squares times values stay finite."""
    most = 1e90 if x.dtype == torch.float64 else 1e9
    return x.clamp(-most, most)


def taylor(x: Tensor) -> Tensor:
    """`[1, x', (x' (x) x') / sqrt(2)]`, `x' = x / D^(1/4)`, P = 1 + D + D^2: the kernel is `1 + s + s^2 / 2`, s = q^T k / sqrt(D)."""
    x = in_range(x) * x.shape[-1] ** -0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)  # [B, H, L, D^2]
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs * math.sqrt(0.5)], -1)


def dpfp(x: Tensor, nu: int) -> Tensor:
    """`r * roll(r, i)` for i = 1 .. nu, with `r = [relu(x), relu(-x)]`, P = 2 D nu."""
    x = in_range(x)
    r = torch.relu(torch.cat([x, -x], -1))  # [B, H, L, 2D]
    return torch.cat([r * r.roll(i, -1) for i in range(1, nu + 1)], -1)


def cosine(x: Tensor) -> Tensor:
    """`[1, x / max(|x|, 1e-3)]`, P = 1 + D: the kernel is `1 + cos(q, k)`, near 1 for vectors far shorter than 0.001."""
    return torch.cat([torch.ones_like(x[..., :1]), unit_length(x)], -1)
