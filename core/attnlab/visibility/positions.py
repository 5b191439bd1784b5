"""Positions that a formula reads: counted from where each row, or each segment, begins. Needs torch; `visibility` imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.visibility.parts import ranks, rows

if TYPE_CHECKING:
    from attnlab.visibility.resolved import Visibility


def unpadded_positions(v: Visibility) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys, counted from the first present key of the row, or of the segment: `[L]` or `[B, L]`."""
    query, key = v.query_positions, v.key_positions
    if v.key_segments is not None and v.query_segments is not None:
        if v.padded_left and v.key_present is not None:
            of = (v.key_segments, v.key_present)
            query = query - leading_absent_of_segments(*of, v.query_segments)
            key = key - leading_absent_of_segments(*of, v.key_segments)
    elif (leading := leading_of(v)) is not None:
        query, key = query - leading[:, None], key - leading[:, None]
    return query, key


def leading_of(v: Visibility) -> Tensor | None:
    """`Visibility.leading`."""
    if not v.padded_left or v.key_present is None:
        return v.past_leading
    if v.past_leading is None:
        return leading_absent(v.key_present)
    new = leading_absent(v.key_present[:, v.past :])
    return v.past_leading + torch.where(v.past_leading == v.past, new, 0)


def leading_absent(present: Tensor) -> Tensor:
    """How many of `present [B, L]` are False before the first True, `[B]`; L where none is True."""
    return (present.cumsum(1) == 0).sum(1)


def leading_absent_of_segments(key_ids: Tensor, present: Tensor, ids: Tensor) -> Tensor:
    """For each of `ids [B, n]` how many keys of that segment are absent before its first present one; 0 where none is present."""
    length = key_ids.shape[1]
    ordered = key_ids.sort(dim=1).values.contiguous()
    begins = torch.searchsorted(ordered, key_ids.contiguous())  # a number for each segment, below L
    place = torch.where(present, ranks(key_ids), length)
    least = place.new_full((place.shape[0], length + 1), length).scatter_reduce(1, begins, place, "amin")
    leading = least.gather(1, torch.searchsorted(ordered, ids.contiguous()))
    return torch.where(leading == length, 0, leading)


def span_of(v: Visibility, side: int) -> tuple[Tensor, Tensor]:
    """Unpadded positions of the first and the last key that each query sees, int64 `[B, H, Lq]`; (0, -1) for one that sees none."""
    if torch.compiler.is_compiling():  # a loop over a length would make one graph for each
        first, last = _ends(v, 0, v.query_length, 0, v.key_length)
        return torch.where(last < 0, 0, first), last
    parts = []
    for q0 in range(0, v.query_length, side):
        q1 = min(q0 + side, v.query_length)
        ends = [_ends(v, q0, q1, k0, min(k0 + side, v.key_length)) for k0 in range(0, v.key_length, side)]
        first = torch.stack([f for f, _ in ends]).amin(0)
        last = torch.stack([n for _, n in ends]).amax(0)
        parts.append((torch.where(last < 0, 0, first), last))
    return torch.cat([f for f, _ in parts], 2), torch.cat([n for _, n in parts], 2)


def _ends(v: Visibility, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor]:
    """`span` for a tile, with a position beyond all for queries that see none of its keys."""
    at, seen = rows(v.unpadded_key_positions, k0, k1)[..., None, :], v.tile(q0, q1, k0, k1)
    if seen is None:
        seen = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=v.device)
    first = torch.where(seen, at, v.key_length).amin(-1)
    last = torch.where(seen, at, -1).amax(-1)
    # A tile may leave axes out: what it says of batch, heads and rows holds for all of them.
    shape = (v.batch, v.num_heads, q1 - q0)
    return first.expand(shape), last.expand(shape)
