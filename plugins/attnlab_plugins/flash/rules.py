"""A call's visibility as the kernels read it: numbers and small integer tensors, never one element a pair. Needs torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = 1 << 30
"""Beyond every length that the kernels take; bounds are clamped to it, so that sums of two fit 32 bits."""


class Rules(NamedTuple):
    """Query `i` sees key `j` where every rule that is not None agrees; absent slots hold zeros already.

    low_number, high_number: `i + low <= j <= i + high`, for all items.  low, high: the same per item, int32 `[B]`; or, in
    segments, the least and greatest `key_positions` that each query sees, int32 `[B, Lq]`.
    query_segments, key_segments: int64 `[B, L]`, equal where a pair is visible; absent tokens hold -2 and -1.
    key_present, query_present: uint8 `[B, L]`. allowed: the bool mask, four axes of which each may be 1, any strides.
    """

    low_number: int | None = None
    high_number: int | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    key_positions: Tensor | None = None
    key_present: Tensor | None = None
    query_present: Tensor | None = None
    allowed: Tensor | None = None


def rules_of(visible: Any | None) -> Rules:
    """The rules of a `Call.visibility`; None stands for "every query sees every key"."""
    if visible is None:
        return Rules()
    left = None if visible.left is None else min(visible.left, FAR)
    right = None if visible.right is None else min(visible.right, FAR)
    made: dict[str, Any] = {"allowed": visible.allowed}
    if visible.query_segments is not None:
        query_ids, key_ids = visible.query_segments.long(), visible.key_segments.long()
        if visible.query_present is not None:
            query_ids = query_ids.masked_fill(~visible.query_present, -2)
        if visible.key_present is not None:
            key_ids = key_ids.masked_fill(~visible.key_present, -1)
        made["query_segments"], made["key_segments"] = query_ids.contiguous(), key_ids.contiguous()
        if visible.positional:
            positions = visible.query_positions.expand(visible.batch, -1)  # [B, Lq]
            made["low"] = None if left is None else _clamped(positions - left)
            made["high"] = None if right is None else _clamped(positions + right)
            made["key_positions"] = visible.key_positions.expand(visible.batch, -1).int().contiguous()
        return Rules(**made)
    if visible.key_present is not None:
        made["key_present"] = visible.key_present.expand(visible.batch, -1).contiguous().view(torch.uint8)
    if visible.query_present is not None:
        made["query_present"] = visible.query_present.expand(visible.batch, -1).contiguous().view(torch.uint8)
    if isinstance(visible.offset, Tensor):
        made["low"] = None if left is None else _clamped(visible.offset - left)  # [B]
        made["high"] = None if right is None else _clamped(visible.offset + right)
    else:
        made["low_number"] = None if left is None else _within(visible.offset - left)
        made["high_number"] = None if right is None else _within(visible.offset + right)
    return Rules(**made)


def _clamped(bounds: Tensor) -> Tensor:
    return bounds.long().clamp(-FAR, FAR).int().contiguous()


def _within(bound: int) -> int:
    return max(-FAR, min(FAR, bound))
