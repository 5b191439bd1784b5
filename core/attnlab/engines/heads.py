"""Grouped-query heads, where query head `h` reads key/value head `h // (Hq // Hkv)`, and the dtype of sums. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def expand_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """`[B, Hkv, L, D]` -> `[B, Hq, L, D]`, each head repeated for its group; a view where `Hq = Hkv`."""
    batch, kv_heads, length, width = tensor.shape
    if kv_heads == num_heads:
        return tensor
    group = num_heads // kv_heads
    return tensor[:, :, None].expand(batch, kv_heads, group, length, width).reshape(batch, num_heads, length, width)


def fold_groups(tensor: Tensor, kv_heads: int) -> Tensor:
    """`[B, Hq, L, D]` -> `[B, Hkv, G, L, D]`, a view: the query heads of a group beside each other."""
    batch, num_heads, length, width = tensor.shape
    return tensor.reshape(batch, kv_heads, num_heads // kv_heads, length, width)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """`function` run outside autocast, which would cast the products of float32 sums down. Its inputs are cast already."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        if not torch.amp.is_autocast_available(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run
