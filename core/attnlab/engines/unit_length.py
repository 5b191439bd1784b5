"""Vectors of unit length, with a derivative that is bounded everywhere. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.engines.heads import accumulation_dtype, in_own_precision

SHORTEST = 1e-3
"""The length that shorter vectors are divided by: its square, 1e-6, is what published delta rules add under the root."""


@in_own_precision
def unit_length(x: Tensor) -> Tensor:
    """`x / max(|x|, 1e-3)` along the last axis, computed in float32 or better, in the dtype of x; 0 at 0.

    The derivative is at most 1000. Squares neither overflow nor underflow: each vector's largest entry is taken out first, which changes
    neither value nor derivative.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    size = wide.detach().abs().amax(-1, keepdim=True).clamp(min=1)
    scaled = wide / size
    square = torch.maximum(scaled.square().sum(-1, keepdim=True), (SHORTEST / size).square())
    return (scaled * square.rsqrt()).to(x.dtype)
