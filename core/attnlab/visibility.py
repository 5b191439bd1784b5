"""Visibility: an AttentionMask met with the shapes of one call. Needs torch; handed to variants in `Call`.

Notation: B batch, H query heads, Lq queries, Lk keys (past ones included, where there is a state).
Query `i` stands at `i + offset`, key `j` at `j`; in segments both restart. Nothing here reads the value of
a tensor: positions and comparisons stay on the device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab._lengths import holds
from attnlab._mask_values import check_values
from attnlab._visibility_parts import (
    broadcast_rows,
    check_shape,
    checked_allowed,
    count_of,
    moved_back,
    past_ids,
    ranks,
    rows,
    slice_axis,
    with_past,
    without_columns,
)
from attnlab.errors import InvalidInput
from attnlab.mask import AttentionMask, MaskMod

_FAR = 1 << 62


def _also(given: MaskMod | None, rule: MaskMod) -> MaskMod:
    """Both rules at once."""
    if given is None:
        return rule
    return lambda b, h, q, k: given(b, h, q, k) & rule(b, h, q, k)


class Visibility:
    """Who sees whom in one call, by tiles or whole.

    `key_present [B, Lk]` and `query_present [B, Lq]` (or None: all) are the absent slots; the gate has
    already cleaned them and zeroes the rows of absent queries afterwards, so `tile` and `dense` speak of
    present queries only. The first `sink_tokens` positions are exempt from the left bound. `offset` is an int, an integer tensor `[B]`, or `[B, Lq]` inside segments.
    `known_dense` is what `dense` gives where somebody has built it already.
    """

    __slots__ = (
        "_key_positions",
        "_query_positions",
        "allowed",
        "batch",
        "device",
        "key_length",
        "key_present",
        "key_segments",
        "known_dense",
        "left",
        "mask_mod",
        "num_heads",
        "offset",
        "query_length",
        "query_present",
        "query_segments",
        "right",
        "sink_tokens",
    )

    def __init__(
        self, batch: int, num_heads: int, query_length: int, key_length: int, device: torch.device
    ) -> None:
        self.batch, self.num_heads, self.device = batch, num_heads, device
        self.query_length, self.key_length = query_length, key_length
        self.left: int | None = None
        self.right: int | None = None
        self.sink_tokens = 0
        self.offset: int | Tensor = 0
        self.key_present: Tensor | None = None
        self.query_present: Tensor | None = None
        self.query_segments: Tensor | None = None
        self.key_segments: Tensor | None = None
        self.allowed: Tensor | None = None
        self.mask_mod: MaskMod | None = None
        self._query_positions: Tensor | None = None
        self._key_positions: Tensor | None = None
        self.known_dense: Tensor | None = None

    @classmethod
    def resolve(
        cls,
        mask: AttentionMask,
        *,
        batch: int,
        num_heads: int,
        query_length: int,
        key_length: int,
        device: torch.device,
        subject: str = "mask",
        past: int | None = None,
        past_present: Tensor | None = None,
        past_segments: Tensor | None = None,
    ) -> Visibility:
        """Judge the mask's shapes against the call's, settle offset and positions.

        `key_length` counts past and new; `past` is the state's length, None without a state. Raises
        `InvalidInput`, whose message opens with `subject`.
        """
        new_length = key_length - (past or 0)
        v = cls(batch, num_heads, query_length, key_length, device)
        if mask.window is not None:
            v.left, v.right = mask.window
        if mask.causal:
            v.right = 0 if v.right is None else min(v.right, 0)
        v.allowed = checked_allowed(mask.allowed, v, subject, past is not None)
        v.mask_mod = mask.mask_mod
        key_mask = mask.key_mask
        if key_mask is not None:
            check_shape(subject, "key_mask", key_mask, (batch, new_length), "[B, Lk]", device)
        for name, lengths in (("key_lengths", mask.key_lengths), ("query_lengths", mask.query_lengths)):
            if lengths is not None:
                check_shape(subject, name, lengths, (batch,), "[B]", device)
        check_values(mask, query_length, new_length, subject)
        if mask.key_lengths is not None:
            counted = torch.arange(new_length, device=device) < mask.key_lengths[:, None]  # [B, new]
            key_mask = counted if key_mask is None else key_mask & counted
        if mask.query_lengths is not None:
            v.query_present = (
                torch.arange(query_length, device=device) < mask.query_lengths[:, None]
            )  # [B, Lq]
        if mask.segments is not None:
            query_ids, key_ids = (broadcast_rows(ids, batch) for ids in mask.segments)
            check_shape(subject, "segments query_ids", query_ids, (batch, query_length), "[B, Lq]", device)
            check_shape(subject, "segments key_ids", key_ids, (batch, new_length), "[B, Lk]", device)
            present = query_ids >= 0
            v.query_present = present if v.query_present is None else v.query_present & present
            key_mask = key_ids >= 0 if key_mask is None else key_mask & (key_ids >= 0)
            v.query_segments = query_ids
            v.key_segments = (
                key_ids if not past else torch.cat([past_ids(past_segments, batch, past, device), key_ids], 1)
            )
        elif past_segments is not None:
            raise InvalidInput(
                f"{subject}: the state holds segments, so its new tokens need segments= as well"
            )
        v.key_present = with_past(key_mask, past_present, batch, past or 0, new_length, device)
        if past is not None:  # a state keeps these: memory that the caller may overwrite will not do
            if v.key_present is not None and v.key_present is mask.key_mask:
                v.key_present = v.key_present.clone()
            if v.key_segments is not None and not past:
                v.key_segments = v.key_segments.clone()
        v._settle_offset(mask, past, subject)
        v._drop_what_hides_nothing()
        return v

    def _settle_offset(self, mask: AttentionMask, past: int | None, subject: str) -> None:
        offset, lq, lk = mask.offset, self.query_length, self.key_length
        if offset is None:
            if past is None and lq != lk and mask.positional:
                raise InvalidInput(
                    f"{subject}: {lq} queries and {lk} keys leave two readings of causal= and window=; "
                    "give offset='top_left' or offset='bottom_right' (decoding), or an int"
                )
            if past is not None and self.query_segments is not None:
                assert self.key_segments is not None
                self.offset = count_of(self.key_segments[:, :past], self.query_segments)  # [B, Lq]
            else:
                self.offset = past or 0
        elif offset == "top_left" if isinstance(offset, str) else False:
            self.offset = 0
        elif isinstance(offset, str):
            self.offset = self._bottom_right(mask, past or 0)
        elif isinstance(offset, Tensor):
            if offset.dim() == 1:
                check_shape(subject, "offset", offset, (self.batch,), "[B]", self.device)
            elif offset.device != self.device and offset.dim() == 0:
                offset = offset.to(self.device)
            self.offset = offset.expand(self.batch)
        else:
            assert not isinstance(offset, str)
            self.offset = offset

    def _bottom_right(self, mask: AttentionMask, past: int) -> int | Tensor:
        if self.query_segments is not None:
            assert self.key_segments is not None
            keys = count_of(self.key_segments, self.query_segments)  # [B, Lq]
            return keys - count_of(self.query_segments, self.query_segments)
        if mask.key_lengths is None and mask.query_lengths is None:
            return self.key_length - self.query_length
        keys_of: int | Tensor = self.key_length if mask.key_lengths is None else mask.key_lengths + past
        queries_of: int | Tensor = self.query_length if mask.query_lengths is None else mask.query_lengths
        return keys_of - queries_of  # [B]

    def _drop_what_hides_nothing(self) -> None:
        """Bounds on positions that no pair can violate are dropped: a decoding step becomes plain."""
        if isinstance(self.offset, int) and self.query_segments is None:
            if self.right is not None and holds(self.offset + self.right >= self.key_length - 1):
                self.right = None
            if self.left is not None and holds(self.query_length - 1 + self.offset - self.left <= 0):
                self.left = None

    def narrowed(self, left: int | None, right: int | None, sink_tokens: int = 0) -> Visibility:
        """A copy with these bounds on positions beside its own, for variants with a window of their own.

        The first `sink_tokens` positions are exempt from this left bound, not from one that was there before.
        """
        both = self._copy()
        if right is not None:
            both.right = right if self.right is None else min(right, self.right)
        if left is not None and self.left is None:
            both.left, both.sink_tokens = left, sink_tokens
        elif left is not None and (
            sink_tokens or self.sink_tokens
        ):  # what one bound exempts the other may hide
            both.mask_mod = _also(self.mask_mod, lambda b, h, q, k: (k >= q - left) | (k < sink_tokens))
        elif left is not None and self.left is not None:
            both.left = min(left, self.left)
        both._drop_what_hides_nothing()
        return both

    def without_keys(self, start: int, stop: int) -> Visibility:
        """A copy for keys of which those from `start` to `stop` were taken out; those behind move up.

        They must stand before every query, and nothing may be packed: then a window counts as before once queries have moved up too.
        What callers wrote as functions is handed the positions that it knows.
        """
        fewer, gone = self._copy(), stop - start
        fewer.key_length, fewer.offset = self.key_length - gone, self.offset - gone
        rule = self.mask_mod
        if (
            self.left is not None and self.sink_tokens < start
        ):  # keys that stay behind are further than they look
            left, sinks = self.left, self.sink_tokens
            rule = _also(rule, lambda b, h, q, k: (k >= q - left) | (k < sinks))
            fewer.left, fewer.sink_tokens = None, 0
        if rule is not None:
            fewer.mask_mod = moved_back(rule, start, gone)
        fewer.allowed = None if self.allowed is None else without_columns(self.allowed, start, stop)
        if self.key_present is not None:
            fewer.key_present = without_columns(self.key_present, start, stop)
        fewer._query_positions = fewer._key_positions = None
        return fewer

    def _copy(self) -> Visibility:
        same = Visibility(self.batch, self.num_heads, self.query_length, self.key_length, self.device)
        for name in Visibility.__slots__:  # not copy.copy: torch.compile cannot trace it
            setattr(same, name, getattr(self, name))
        same.known_dense = None
        return same

    # -- what the parts say -----------------------------------------------------------------------------------

    @property
    def positional(self) -> bool:
        """Whether a bound on positions is left (causal is a right bound of 0)."""
        return self.left is not None or self.right is not None

    @property
    def pairwise(self) -> bool:
        """Whether anything but absent slots hides something."""
        return (
            self.positional
            or self.allowed is not None
            or self.mask_mod is not None
            or self.query_segments is not None
        )

    @property
    def only_causal(self) -> bool:
        """Whether a right bound of 0 is the only pairwise rule (absent keys aside)."""
        return (
            self.right == 0
            and self.left is None
            and self.allowed is None
            and self.mask_mod is None
            and self.query_segments is None
        )

    @property
    def query_positions(self) -> Tensor:
        """`[Lq]`, or `[B, Lq]` where offsets differ or segments restart them; int64."""
        if self._query_positions is None:
            own = torch.arange(self.query_length, device=self.device)
            if self.query_segments is not None:
                own = ranks(self.query_segments)  # [B, Lq]
            if isinstance(self.offset, Tensor):
                own = own + (self.offset[:, None] if self.offset.dim() == 1 else self.offset)
            elif self.offset:
                own = own + self.offset
            self._query_positions = own
        return self._query_positions

    @property
    def key_positions(self) -> Tensor:
        """`[Lk]`, or `[B, Lk]` in segments; int64."""
        if self._key_positions is None:
            if self.key_segments is not None:
                self._key_positions = ranks(self.key_segments)
            else:
                self._key_positions = torch.arange(self.key_length, device=self.device)
        return self._key_positions

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """The keys `[first, last)` that queries `[start, stop)` could see, sink tokens apart, from numbers alone."""
        if not isinstance(self.offset, int) or self.query_segments is not None:
            return 0, self.key_length
        first = 0 if self.left is None else max(0, start + self.offset - self.left)
        last = (
            self.key_length
            if self.right is None
            else min(self.key_length, stop - 1 + self.offset + self.right + 1)
        )
        return first, max(first, last)

    def key_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """`key_range`, and before it that of the sink tokens; what is empty is left out."""
        first, last = self.key_range(start, stop)
        both = [(0, min(self.sink_tokens, first, last, self.key_length)), (first, last)]
        return [(a, b) for a, b in both if a < b]

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> Literal["empty", "full", "partial"]:
        """What is known of a tile without looking at tensors; `partial` where it must be looked at."""
        if torch.compiler.is_compiling():  # a graph may not depend on where a tile lies
            return "partial" if self.pairwise or self.key_present is not None else "full"
        first, last = self.key_range(q0, q1)
        if k0 >= last or (k1 <= first and k0 >= self.sink_tokens):
            return "empty"
        if self.pairwise or self.key_present is not None:
            if self.allowed is not None or self.mask_mod is not None or self.key_present is not None:
                return "partial"
            if not isinstance(self.offset, int) or self.query_segments is not None:
                return "partial"
            low = -_FAR if self.left is None else q1 - 1 + self.offset - self.left
            high = _FAR if self.right is None else q0 + self.offset + self.right
            return "full" if (k0 >= low or k1 <= self.sink_tokens) and k1 - 1 <= high else "partial"
        return "full"

    def dense(self) -> Tensor:
        """The whole mask, bool, broadcastable to `[B, H, Lq, Lk]`."""
        if self.known_dense is not None:
            return self.known_dense
        tile = self.tile(0, self.query_length, 0, self.key_length)
        if tile is None:
            return torch.ones(1, 1, self.query_length, self.key_length, dtype=torch.bool, device=self.device)
        return tile.expand(*tile.shape[:2], self.query_length, self.key_length)

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
        """Visibility of queries `[q0, q1)` to keys `[k0, k1)`: bool, broadcastable, or None where all is visible."""
        rules: list[Tensor] = []
        if self.positional and self.kind(q0, q1, k0, k1) != "full":
            q = rows(self.query_positions, q0, q1)[..., :, None]  # [B|1, 1, tq, 1]
            k = rows(self.key_positions, k0, k1)[..., None, :]  # [B|1, 1, 1, tk]
            if self.right is not None:
                rules.append(k <= q + self.right if self.right else k <= q)
            if self.left is not None:
                near = k >= q - self.left
                rules.append(near | (k < self.sink_tokens) if self.sink_tokens else near)
        if self.query_segments is not None and self.key_segments is not None:
            rules.append(self.query_segments[:, None, q0:q1, None] == self.key_segments[:, None, None, k0:k1])
        if self.key_present is not None:
            rules.append(self.key_present[:, None, None, k0:k1])
        if self.allowed is not None:
            rules.append(slice_axis(slice_axis(self.allowed, 2, q0, q1), 3, k0, k1))
        if self.mask_mod is not None:
            rules.append(self._modified(q0, q1, k0, k1))
        if not rules:
            return None
        seen = rules[0]
        for rule in rules[1:]:
            seen = seen & rule
        return seen

    def span(self, side: int = 1 << 10) -> tuple[Tensor, Tensor]:
        """Positions of the first and the last key that each query sees, int64 `[B, H, Lq]`; (0, -1) for one that sees none."""
        if torch.compiler.is_compiling():  # a loop over a length would make one graph for each
            first, last = self._ends(0, self.query_length, 0, self.key_length)
            return torch.where(last < 0, 0, first), last
        parts = []
        for q0 in range(0, self.query_length, side):
            q1 = min(q0 + side, self.query_length)
            ends = [
                self._ends(q0, q1, k0, min(k0 + side, self.key_length))
                for k0 in range(0, self.key_length, side)
            ]
            first = torch.stack([f for f, _ in ends]).amin(0)
            last = torch.stack([n for _, n in ends]).amax(0)
            parts.append((torch.where(last < 0, 0, first), last))
        return torch.cat([f for f, _ in parts], 2), torch.cat([n for _, n in parts], 2)

    def _ends(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor]:
        """`span` for a tile, with a position beyond all for queries that see none of its keys."""
        at, seen = rows(self.key_positions, k0, k1)[..., None, :], self.tile(q0, q1, k0, k1)
        if seen is None:
            seen = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        first = torch.where(seen, at, self.key_length).amin(-1)
        last = torch.where(seen, at, -1).amax(-1)
        # A tile may leave axes out: what it says of batch, heads and rows holds for all of them.
        shape = (self.batch, self.num_heads, q1 - q0)
        return first.expand(shape), last.expand(shape)

    def _modified(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        assert self.mask_mod is not None
        seen: Any = self.mask_mod(*self.indices(q0, q1, k0, k1))
        if isinstance(seen, bool):
            seen = torch.full((), seen, device=self.device)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise InvalidInput(
                f"mask_mod must return bool, True = may attend, got {got}; use score_mod= to change scores"
            )
        full = [self.batch, self.num_heads, q1 - q0, k1 - k0]
        lead = [1] * (4 - seen.dim()) + list(seen.shape)
        if len(lead) != 4 or any(have not in (1, want) for have, want in zip(lead, full, strict=True)):
            raise InvalidInput(
                f"mask_mod must return bool that broadcasts to {full}, the shapes of b, h, q, k, got {list(seen.shape)}"
            )
        return seen.expand(*lead[:2], q1 - q0, k1 - k0)

    def indices(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(b, h, q, k)` for `mask_mod` and `score_mod`: integer tensors that broadcast to `[B, H, tq, tk]`."""
        b = torch.arange(self.batch, device=self.device)[:, None, None, None]
        h = torch.arange(self.num_heads, device=self.device)[None, :, None, None]
        q = rows(self.query_positions, q0, q1)[..., :, None]
        k = rows(self.key_positions, k0, k1)[..., None, :]
        return b, h, q, k
