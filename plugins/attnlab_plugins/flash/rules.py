"""A call's visibility as the kernels read it: numbers and small integer tensors, never one element a pair. Needs torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = 1 << 30
"""Beyond every length that the kernels take; bounds are clamped to it, so that sums of two fit 32 bits."""


class Rules(NamedTuple):
    """Query `i` sees key `j` where every rule that is not None agrees; padding holds zeros already.

    low_number, high_number: `i + low <= j <= i + high`, for all items.  low, high: the same per item, int32 `[B]`; or, in
    segments, the least and greatest `key_positions` that each query sees, int32 `[B, Lq]`.
    query_segments, key_segments: int64 `[B, L]`, equal where a pair is visible; padded tokens hold -2 and -1.
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


def rules_of(visibility: Any | None) -> Rules:
    """The rules of a `Call.visibility`; None stands for "every query sees every key"."""
    if visibility is None:
        return Rules()
    left = None if visibility.left is None else min(visibility.left, FAR)
    right = None if visibility.right is None else min(visibility.right, FAR)
    fields: dict[str, Any] = {"allowed": visibility.allowed}
    if visibility.query_segments is not None:
        query_ids, key_ids = visibility.query_segments.long(), visibility.key_segments.long()
        if visibility.query_present is not None:
            query_ids = query_ids.masked_fill(~visibility.query_present, -2)
        if visibility.key_present is not None:
            key_ids = key_ids.masked_fill(~visibility.key_present, -1)
        fields["query_segments"], fields["key_segments"] = query_ids.contiguous(), key_ids.contiguous()
        if visibility.positional:
            positions = visibility.query_positions.expand(visibility.batch, -1)  # [B, Lq]
            fields["low"] = None if left is None else _clamped(positions - left)
            fields["high"] = None if right is None else _clamped(positions + right)
            fields["key_positions"] = visibility.key_positions.expand(visibility.batch, -1).int().contiguous()
        return Rules(**fields)
    if visibility.key_present is not None:
        fields["key_present"] = visibility.key_present.expand(visibility.batch, -1).contiguous().view(torch.uint8)
    if visibility.query_present is not None:
        fields["query_present"] = visibility.query_present.expand(visibility.batch, -1).contiguous().view(torch.uint8)
    if isinstance(visibility.offset, Tensor):
        fields["low"] = None if left is None else _clamped(visibility.offset - left)  # [B]
        fields["high"] = None if right is None else _clamped(visibility.offset + right)
    else:
        fields["low_number"] = None if left is None else _within(visibility.offset - left)
        fields["high_number"] = None if right is None else _within(visibility.offset + right)
    return Rules(**fields)


def _clamped(bounds: Tensor) -> Tensor:
    return bounds.long().clamp(-FAR, FAR).int().contiguous()


def _within(bound: int) -> int:
    return max(-FAR, min(FAR, bound))
