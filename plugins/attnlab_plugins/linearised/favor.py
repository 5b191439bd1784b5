"""FAVOR+: positive random features of the softmax's kernel [Choromanski et al. 2020]. Needs torch.

`exp(q^T k / sqrt(D))` is the mean over Gaussian w of `exp(w^T q' - |q'|^2 / 2) exp(w^T k' - |k'|^2 / 2)`, `x' = x / D^(1/4)`;
features are these factors for m rows w, orthogonal by blocks (their lemma 1 and section 2.4).

Stabilisers. A query's largest feature divides its row, and cancels in the quotient. A key has none that depends on its content:
one of its own would change its weight beside other keys, and one of all keys would let the future, batch mates and the split
into calls be felt. It needs none against overflow: `w^T k - |k|^2 / 2 <= |w|^2 / 2`, with equality at k = w. What the longest
row leaves free below `exp(20)` (float64: `exp(200)`, so that cubes of sums, which second derivatives divide by, stay in range) is
one factor for all keys, which cancels, and keeps long keys from underflow. Rows have a squared length of about D: beyond
widths near 32 the longest leaves nothing. Features are held to `exp(60)` (float64: `exp(600)`), which only keys close to a row
longer than that can reach, about `D^(3/4)` long.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
from torch import Tensor

from attnlab_plugins.linearised.coordinates import exp_below_top, largest_exponent


def default_features(width: int) -> int:
    """m, `D ln D` as their theorem 4 has it, and D at least."""
    return max(width, int(width * math.log(width)))


def draw_rows(count: int, width: int, seed: int, number: int) -> Tensor:
    """`w [count, width]`, float64 on the CPU: each row a Gaussian vector, those of a block of `width` rows orthogonal.

    A function of the seed and the number of the draw alone. Directions are those of a random rotation, lengths are drawn anew
    as those of independent Gaussian vectors, chi with `width` degrees of freedom.
    """
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def normal() -> Tensor:
        return torch.randn(width, width, dtype=torch.float64, device="cpu", generator=generator)

    blocks = []
    for _ in range(-(-count // width)):
        rotation, upper = torch.linalg.qr(normal())
        # The signs make it uniform over all rotations: QR by itself prefers some.
        rotation = rotation * torch.where(upper.diagonal() < 0, -1.0, 1.0)
        blocks.append(rotation.mT * normal().norm(dim=1, keepdim=True))
    return torch.cat(blocks)[:count]


def log_features(x: Tensor, w: Tensor) -> Tensor:
    """`w^T x' - |x'|^2 / 2 - log(m) / 2`, `[B, H, L, m]` of `x [B, H, L, D]` and `w [m, D]`."""
    x = x * x.shape[-1] ** -0.25
    half = x.square().sum(-1, keepdim=True) / 2 + math.log(w.shape[0]) / 2
    return x @ w.to(x).mT - half


def favor(x: Tensor, w: Tensor, role: Literal["query", "key"]) -> Tensor:
    """The features `[B, H, L, m]`, up to a factor for each query and one for all keys."""
    logs = log_features(x, w)
    if role == "query":
        return exp_below_top(logs)
    most = largest_exponent(x.dtype)
    free = (most / 3 - w.to(x).square().sum(-1).amax() / 2).clamp(min=0)
    # Not exp(logs + free), whose sum is rounded; nor exp(logs) exp(free), whose first factor underflows.
    half = torch.exp(torch.minimum(logs, most - free) / 2) * torch.exp(free / 2)
    return half.square()
