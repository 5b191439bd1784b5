"""Kernels `phi(q_i)^T phi(k_j)` of linearised attention, pair by pair. Needs torch; imported by attnlab.formulas only.

Each takes query and key `[B, H, L, D]` per query head and gives `[B, H, Lq, Lk]`; what stands at hidden pairs is for
the caller to drop. Written from the kernel itself where it has a closed form, else from the features by index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import pair_products


def taylor(query: Tensor, key: Tensor, *, visible: Tensor, **others: Any) -> Tensor:
    """1 + s + s^2 / 2, s = q^T k / sqrt(D) [Arora et al. 2024, section 4.1]."""
    s = pair_products(query, key, visible) / math.sqrt(query.shape[-1])
    return 1 + s + s * s / 2


def dpfp(query: Tensor, key: Tensor, *, visible: Tensor, options: Mapping[str, Any], **others: Any) -> Tensor:
    """The features r_a r_b with b = a - i modulo 2D, i = 1 .. nu, of r = [relu x, relu -x] [Schlag et al. 2021, eq. 37, 38]."""

    def features(x: Tensor) -> Tensor:
        rectified = [x[..., d].clamp(min=0) for d in range(x.shape[-1])]
        rectified += [(-x[..., d]).clamp(min=0) for d in range(x.shape[-1])]
        count = len(rectified)
        pairs = [(a, (a - i) % count) for i in range(1, options["nu"] + 1) for a in range(count)]
        return torch.stack([rectified[a] * rectified[b] for a, b in pairs], dim=-1)

    return pair_products(features(query), features(key), visible)


def cosine(query: Tensor, key: Tensor, *, visible: Tensor, **others: Any) -> Tensor:
    """1 + q^T k / (|q| |k|) [Li et al. 2020]; 1 where either is zero."""
    sizes = [torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (query, key)]
    q, k = (x / torch.where(size == 0, 1, size) for x, size in zip((query, key), sizes, strict=True))
    return 1 + pair_products(q, k, visible)


Kernel = Callable[..., Tensor]
KERNELS: Mapping[str, Kernel] = MappingProxyType({"taylor": taylor, "dpfp": dpfp, "cosine": cosine})
