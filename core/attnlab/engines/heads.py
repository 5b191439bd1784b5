"""Grouped-query heads: query head `h` reads key/value head `h // (Hq // Hkv)`. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """`[B, Hkv, L, D]` -> `[B, Hq, L, D]`, each head repeated for its group; a view where `Hq = Hkv`."""
    batch, kv_heads, length, width = tensor.shape
    if kv_heads == num_heads:
        return tensor
    group = num_heads // kv_heads
    return (
        tensor[:, :, None]
        .expand(batch, kv_heads, group, length, width)
        .reshape(batch, num_heads, length, width)
    )


def fold_groups(tensor: Tensor, kv_heads: int) -> Tensor:
    """`[B, Hq, L, D]` -> `[B, Hkv, G, L, D]`, a view: the query heads of a group beside each other."""
    batch, num_heads, length, width = tensor.shape
    return tensor.reshape(batch, kv_heads, num_heads // kv_heads, length, width)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
