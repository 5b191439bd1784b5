"""Visibility: an `AttentionMask` resolved for the shapes of one call. Needs torch; variants get it in `Call`.

Notation: B batch, H query heads, Lq queries, Lk keys (past ones included, where there is a state).
Query `i` stands at `i + offset`, key `j` at `j`; in segments both restart. The caller's rules (causal, window, mask_mod,
score_mod) mean these positions. A formula that reads where a sequence begins (sink tokens, a table indexed by position)
means the unpadded ones, counted from the first present key of the row, so that a row with padding on its left is the row alone.
Nothing here reads the value of a tensor: positions and comparisons stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnlab._lengths import holds
from attnlab.errors import InvalidInput, PluginError

if TYPE_CHECKING:
    from attnlab.state import State
    from attnlab.visibility.mask import AttentionMask, MaskMod

_FAR = 1 << 62
Rule = Callable[..., Any]


class Forgotten(NamedTuple):
    """The keys from `start` to `stop` that a state no longer holds.

    front `[B, start]`: which keys the first `start` columns hold, where these are not the first `start` keys; a column that
    would hold a key from `stop` on holds none.
    """

    start: int
    stop: int
    front: Tensor | None = None

    def placed(self, weights: Tensor) -> Tensor:
        """Weights `[B, H, Lq, held]` over the keys that are held as weights `[B, H, Lq, Lk]` over all of them; those of forgotten keys are 0."""
        first, rest = weights[..., : self.start], weights[..., self.start :]
        gone = weights.new_zeros(*weights.shape[:3], self.stop - self.start)
        if self.front is None:
            return torch.cat([first, gone, rest], -1)
        others = torch.cat([torch.zeros_like(first), gone, rest], -1)
        index = self.front.clamp(max=others.shape[3] - 1)[:, None, None].expand_as(first)
        return others.scatter_add(3, index, first)

    def taken(self, weights: Tensor) -> Tensor:
        """The inverse of `placed`."""
        rest = weights[..., self.stop :]
        if self.front is None:
            return torch.cat([weights[..., : self.start], rest], -1)
        first = columns_at(weights, self.front) * (self.front < self.stop)[:, None, None]
        return torch.cat([first, rest], -1)


class Visibility:
    """Which query may attend to which key in one call, by tiles or whole.

    `key_present [B, Lk]` and `query_present [B, Lq]` (or None: all) mark padding with False; it holds zeros
    already, and the rows of padded queries become zeros afterwards, so that `tile` and `dense` speak of present queries only. The first `sink_tokens` unpadded positions are exempt from `left`, not from `strict_left`, which is set
    beside it where it is the larger of two bounds. `offset` is an int, an integer tensor `[B]`, or `[B, Lq]` inside segments.
    `padded_left`: whether a row may begin with padded keys; `past_leading [B]`: with how many of the past, for states that do not
    keep `key_present`. `known_dense` is what `dense` gives where somebody has built it already.
    """

    __slots__ = (
        "_key_positions",
        "_query_positions",
        "_unpadded",
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
        "padded_left",
        "past",
        "past_leading",
        "query_length",
        "query_present",
        "query_segments",
        "right",
        "sink_tokens",
        "strict_left",
    )

    def __init__(self, batch: int, num_heads: int, query_length: int, key_length: int, device: torch.device) -> None:
        self.batch, self.num_heads, self.device = batch, num_heads, device
        self.query_length, self.key_length = query_length, key_length
        self.left: int | None = None
        self.strict_left: int | None = None
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
        self._unpadded: tuple[Tensor, Tensor] | None = None
        self.padded_left = False
        self.past = 0
        self.past_leading: Tensor | None = None
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
        past_leading: Tensor | None = None,
    ) -> Visibility:
        """Validate the shapes of the mask against those of the call, and resolve offset and positions.

        `key_length` counts past and new; `past` is the state's length, None without a state; the other `past_` arguments are what
        the state keeps (`State`). Raises `InvalidInput`, whose message opens with `subject`.
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
        mask.check_values(query_length, new_length, subject)
        if mask.key_lengths is not None:
            counted = torch.arange(new_length, device=device) < mask.key_lengths[:, None]  # [B, new]
            key_mask = counted if key_mask is None else key_mask & counted
        if mask.query_lengths is not None:
            v.query_present = torch.arange(query_length, device=device) < mask.query_lengths[:, None]  # [B, Lq]
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
            raise InvalidInput(f"{subject}: the state holds segments, so its new tokens need segments= as well")
        v.key_present = with_past(key_mask, past_present, batch, past or 0, new_length, device)
        # Lengths leave the first key in place, except one that continues a past without any.
        v.padded_left = (
            mask.key_mask is not None
            or past_leading is not None
            or ((past_present is not None or mask.key_lengths is not None) and bool(past))
        )
        v.past, v.past_leading = past or 0, past_leading
        if past is not None:  # a state keeps these: memory that the caller may overwrite will not do
            if v.key_present is not None and v.key_present is mask.key_mask:
                v.key_present = v.key_present.clone()
            if v.key_segments is not None and not past:
                v.key_segments = v.key_segments.clone()
        v._resolve_offset(mask, past, subject)
        v._drop_what_hides_nothing()
        return v

    @classmethod
    def causal(cls, query: Tensor, key: Tensor) -> Visibility:
        """The visibility of `causal=True` alone, for tensors `[B, H, L, D]` of equal lengths."""
        visibility = cls(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
        visibility.right = 0
        visibility._drop_what_hides_nothing()
        return visibility

    def _resolve_offset(self, mask: AttentionMask, past: int | None, subject: str) -> None:
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
        """Bounds on positions that no pair can violate are dropped: a decoding step becomes plain.

        Not where `torch.jit.trace` records, whose program serves other lengths.
        """
        if torch._C._get_tracing_state() is not None:
            return
        certain = holds if torch.compiler.is_compiling() else bool  # in a graph, for every length that it serves
        if isinstance(self.offset, int) and self.query_segments is None:
            if self.right is not None and certain(self.offset + self.right >= self.key_length - 1):
                self.right = None
            furthest = self.query_length - 1 + self.offset
            if self.strict_left is not None and certain(furthest - self.strict_left <= 0):
                self.strict_left = None
            if self.left is not None and certain(furthest - self.left <= 0):
                self.left = None

    def narrowed(self, left: int | None, right: int | None, sink_tokens: int = 0) -> Visibility:
        """A copy with these bounds on positions beside its own, for variants with a window of their own.

        The first `sink_tokens` unpadded positions are exempt from this left bound, not from one that was there before.
        """
        both = self._copy()
        if right is not None:
            both.right = right if self.right is None else min(right, self.right)
        if left is not None:
            bounds = [(left, sink_tokens)]
            if self.left is not None:
                bounds.append((self.left, self.sink_tokens))
            if self.strict_left is not None:
                bounds.append((self.strict_left, 0))
            both.left, both.sink_tokens, both.strict_left = joined(bounds)
        both._drop_what_hides_nothing()
        return both

    def without_keys(self, start: int, stop: int, front: Tensor | None = None) -> Visibility:
        """A copy for keys of which those from `start` to `stop` were taken out; those behind move up.

        They must stand before every query, and nothing may be packed: then a window counts as before once queries have moved up too.
        front `[B, start]`: which keys the first `start` columns hold, where these are not the first `start` keys; a column that
        would hold a key from `stop` on holds none. What callers wrote as functions is handed the positions that it knows.
        """
        fewer, gone = self._copy(), stop - start
        fewer.key_length, fewer.offset = self.key_length - gone, self.offset - gone
        rule = self.mask_mod
        # Keys that stay in front are further from their queries than they look now.
        if self.left is not None and self.sink_tokens < start:
            rule = also(rule, within_left(self.left, self.sink_tokens))
            fewer.left, fewer.sink_tokens = None, 0
        if self.strict_left is not None and start:
            rule = also(rule, within_left(self.strict_left, 0))
            fewer.strict_left = None
        if rule is not None:
            fewer.mask_mod = moved_back(rule, start, gone, front)
        fewer.allowed = None if self.allowed is None else without_columns(self.allowed, start, stop, front)
        if self.key_present is not None:
            fewer.key_present = without_columns(self.key_present, start, stop, front)
            if front is not None:
                held = torch.nn.functional.pad(front < stop, (0, self.key_length - stop), value=True)
                fewer.key_present = fewer.key_present & held
        fewer._query_positions = fewer._key_positions = None
        if front is None:
            fewer.padded_left = False
        else:
            query, key = self._both_unpadded()
            fewer._unpadded = query, torch.cat([(front - front[:, :1]), key[:, stop:]], 1)
        fewer._drop_what_hides_nothing()
        return fewer

    def _copy(self) -> Visibility:
        same = Visibility(self.batch, self.num_heads, self.query_length, self.key_length, self.device)
        for name in Visibility.__slots__:  # not copy.copy: torch.compile cannot trace it
            setattr(same, name, getattr(self, name))
        same.known_dense = None
        same._unpadded = None
        return same

    # -- what the parts say -----------------------------------------------------------------------------------

    @property
    def positional(self) -> bool:
        """Whether a bound on positions is left (causal is a right bound of 0)."""
        return self.left is not None or self.right is not None

    @property
    def pairwise(self) -> bool:
        """Whether anything but padding hides a pair."""
        return (
            self.positional or self.allowed is not None or self.mask_mod is not None or self.query_segments is not None
        )

    @property
    def only_causal(self) -> bool:
        """Whether a right bound of 0 is the only pairwise rule (padding aside)."""
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

    @property
    def leading(self) -> Tensor | None:
        """How many padded keys each row begins with, int64 `[B]`, all of them where none is present; None where no row may begin with one."""
        return _leading_of(self)

    @property
    def unpadded_key_positions(self) -> Tensor:
        """`key_positions` counted from the first present key of the row, or of the segment: `[Lk]` or `[B, Lk]`; negative for padding before it."""
        return self._both_unpadded()[1]

    @property
    def unpadded_query_positions(self) -> Tensor:
        """`query_positions` counted from the first present key of the row, or of the segment: `[Lq]` or `[B, Lq]`."""
        return self._both_unpadded()[0]

    def _both_unpadded(self) -> tuple[Tensor, Tensor]:
        if self._unpadded is None:
            self._unpadded = _unpadded_positions(self)
        return self._unpadded

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """The keys `[first, last)` that queries `[start, stop)` could see, sink tokens apart, from numbers alone."""
        if not isinstance(self.offset, int) or self.query_segments is not None:
            return 0, self.key_length
        first = 0 if self.left is None else max(0, start + self.offset - self.left)
        if self.sink_tokens and self.padded_left:  # sink tokens may stand anywhere
            first = 0 if self.strict_left is None else max(0, start + self.offset - self.strict_left)
        last = self.key_length if self.right is None else min(self.key_length, stop - 1 + self.offset + self.right + 1)
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
            strict = -_FAR if self.strict_left is None else q1 - 1 + self.offset - self.strict_left
            high = _FAR if self.right is None else q0 + self.offset + self.right
            inside = (k0 >= low or k1 <= self.sink_tokens) and k0 >= strict and k1 - 1 <= high
            return "full" if inside else "partial"
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
                if self.sink_tokens:
                    near = near | (rows(self.unpadded_key_positions, k0, k1)[..., None, :] < self.sink_tokens)
                rules.append(near)
            if self.strict_left is not None:
                rules.append(k >= q - self.strict_left)
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
        visible = rules[0]
        for rule in rules[1:]:
            visible = visible & rule
        return visible

    def span(self, side: int = 1 << 10) -> tuple[Tensor, Tensor]:
        """Unpadded positions of the first and the last key that each query sees, int64 `[B, H, Lq]`; (0, -1) for one that sees none."""
        return _span_of(self, side)

    def _modified(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        assert self.mask_mod is not None
        full = [self.batch, self.num_heads, q1 - q0, k1 - k0]
        return checked_mod(self.mask_mod(*self.indices(q0, q1, k0, k1)), full, self.device)

    def indices(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(b, h, q, k)` for `mask_mod` and `score_mod`: integer tensors that broadcast to `[B, H, tq, tk]`."""
        b = torch.arange(self.batch, device=self.device)[:, None, None, None]
        h = torch.arange(self.num_heads, device=self.device)[None, :, None, None]
        q = rows(self.query_positions, q0, q1)[..., :, None]
        k = rows(self.key_positions, k0, k1)[..., None, :]
        return b, h, q, k


def resolve_call(
    mask: AttentionMask, query: Tensor, key: Tensor, state: State | None, subject: str
) -> tuple[Visibility, Tensor | None]:
    """The visibility of one call, and which of its own keys are padding.

    padding: bool `[B, 1, Lk, 1]`, or None if no key is. Both come from the cache of the mask if it has one.
    """
    cache = None if state is not None else mask.cache
    if cache is None:
        return _resolved(mask, query, key, state, subject)
    batch, heads, length, _ = query.shape
    sizes = (batch, heads, length, key.shape[2], query.device, torch.is_inference_mode_enabled())
    resolved: tuple[Visibility, Tensor | None] | None = cache.resolved.get(
        sizes
    )  # one look: another thread may empty it
    if resolved is None:
        visibility, padding = resolved = _resolved(mask, query, key, None, subject)
        if cache.dense is not None and tuple(cache.dense.shape) == (batch, 1, length, key.shape[2]):
            visibility.known_dense = cache.dense
        cache.resolved.put(sizes, (visibility, padding))
    return resolved


def _resolved(
    mask: AttentionMask, query: Tensor, key: Tensor, state: State | None, subject: str
) -> tuple[Visibility, Tensor | None]:
    past, new = None if state is None else state.length, key.shape[2]
    visibility = Visibility.resolve(
        mask,
        batch=query.shape[0],
        num_heads=query.shape[1],
        query_length=query.shape[2],
        key_length=new + (past or 0),
        device=query.device,
        subject=subject,
        past=past,
        past_present=None if state is None else state.key_present,
        past_segments=None if state is None else state.key_segments,
        past_leading=None if state is None else state.leading,
    )
    present = visibility.key_present
    if present is None:
        return visibility, None
    return visibility, ~present[:, None, -new:, None] if new else present[:, None, :0, None]


# -- positions that a formula reads: counted from the first present key of the row, or of the segment -----------------


def _unpadded_positions(v: Visibility) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys, counted from the first present key of the row, or of the segment: `[L]` or `[B, L]`."""
    query, key = v.query_positions, v.key_positions
    if v.key_segments is not None and v.query_segments is not None:
        if v.padded_left and v.key_present is not None:
            of = (v.key_segments, v.key_present)
            query = query - leading_absent_of_segments(*of, v.query_segments)
            key = key - leading_absent_of_segments(*of, v.key_segments)
    elif (leading := _leading_of(v)) is not None:
        query, key = query - leading[:, None], key - leading[:, None]
    return query, key


def _leading_of(v: Visibility) -> Tensor | None:
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
    """For each of `ids [B, n]` how many keys of that segment are padding before its first present one; 0 where none is present."""
    length = key_ids.shape[1]
    ordered = key_ids.sort(dim=1).values.contiguous()
    begins = torch.searchsorted(ordered, key_ids.contiguous())  # a number for each segment, below L
    place = torch.where(present, ranks(key_ids), length)
    least = place.new_full((place.shape[0], length + 1), length).scatter_reduce(1, begins, place, "amin")
    leading = least.gather(1, torch.searchsorted(ordered, ids.contiguous()))
    return torch.where(leading == length, 0, leading)


def _span_of(v: Visibility, side: int) -> tuple[Tensor, Tensor]:
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
    at, visible = rows(v.unpadded_key_positions, k0, k1)[..., None, :], v.tile(q0, q1, k0, k1)
    if visible is None:
        visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=v.device)
    first = torch.where(visible, at, v.key_length).amin(-1)
    last = torch.where(visible, at, -1).amax(-1)
    # A tile may leave axes out: what it says of batch, heads and rows holds for all of them.
    shape = (v.batch, v.num_heads, q1 - q0)
    return first.expand(shape), last.expand(shape)


# -- parts of a visibility --------------------------------------------------------------------------------------------


def rows(positions: Tensor, start: int, stop: int) -> Tensor:
    """`[1, 1, n]` or `[B, 1, n]` of positions `[L]` or `[B, L]`."""
    part = positions[..., start:stop]
    return part[None, None] if part.dim() == 1 else part[:, None]


def slice_axis(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, start, stop - start)


def without_columns(tensor: Tensor, start: int, stop: int, front: Tensor | None = None) -> Tensor:
    """The last axis, keys, without those from `start` to `stop`; one column that stands for all stays.

    front `[B, start]`: the keys whose columns come first, where these are not the first `start`.
    """
    if tensor.shape[-1] == 1:
        return tensor
    if not start:
        return tensor[..., stop:]
    if front is None:
        return torch.cat([tensor[..., :start], tensor[..., stop:]], -1)
    rest = tensor[..., stop:]
    first = columns_at(tensor, front)
    return torch.cat([first, rest.expand(*first.shape[:-1], rest.shape[-1])], -1)


def columns_at(tensor: Tensor, index: Tensor) -> Tensor:
    """Of `tensor [B | 1, ..., Lk]` the columns `index [B, n]`, another choice for each row; past the end, the last one."""
    index = index.clamp(max=tensor.shape[-1] - 1)
    index = index.view(index.shape[0], *(1,) * (tensor.dim() - 2), index.shape[1])
    shape = (index.shape[0], *tensor.shape[1:-1])
    return tensor.expand(*shape, -1).gather(-1, index.expand(*shape, -1))


def moved_back(function: Callable[..., Any], start: int, gone: int, front: Tensor | None = None) -> Callable[..., Any]:
    """A `mask_mod` or `score_mod` of positions, for positions where `gone` keys from `start` on were taken out.

    front `[B, start]`: the keys that come first, where these are not the first `start`.
    """

    def moved(*parts: Any) -> Any:
        *others, b, h, q, k = parts
        first = k if front is None else front[b, k.clamp(max=start - 1)]
        return function(*others, b, h, q + gone, torch.where(k < start, first, k + gone))

    return moved


def also(inputs: Rule | None, rule: Rule) -> Rule:
    """Both rules at once."""
    if inputs is None:
        return rule
    return lambda b, h, q, k: inputs(b, h, q, k) & rule(b, h, q, k)


def within_left(left: int, sink_tokens: int) -> Rule:
    return lambda b, h, q, k: (k >= q - left) | (k < sink_tokens)


def joined(bounds: list[tuple[int, int]]) -> tuple[int, int, int | None]:
    """`(left, sink_tokens, strict_left)` of left bounds `(left, sink_tokens)`, at most one of which exempts sink tokens."""
    strict: int | None = None
    exempt = [bound for bound in bounds if bound[1]]
    for left, sinks in bounds:  # a loop: torch.compile cannot trace min(..., default=)
        if not sinks:
            strict = left if strict is None else min(strict, left)
    if len(exempt) > 1:
        raise PluginError(
            f"two windows with sink tokens do not combine: got {exempt[0]} and {exempt[1]} (left, sink_tokens)"
        )
    if not exempt or (strict is not None and strict <= exempt[0][0]):
        assert strict is not None
        return strict, 0, None
    return *exempt[0], strict


def broadcast_rows(ids: Tensor, batch: int) -> Tensor:
    return ids.expand(batch, -1) if ids.shape[0] == 1 else ids


def past_ids(past_segments: Tensor | None, batch: int, past: int, device: torch.device) -> Tensor:
    if past_segments is not None:
        return past_segments
    raise InvalidInput("segments: the state holds tokens without segments; start a new state for packed input")


def with_past(
    new: Tensor | None, past_present: Tensor | None, batch: int, past: int, new_length: int, device: torch.device
) -> Tensor | None:
    if not past or (new is None and past_present is None):
        return new if not past else None
    old = past_present if past_present is not None else torch.ones(batch, past, dtype=torch.bool, device=device)
    fresh = new if new is not None else torch.ones(batch, new_length, dtype=torch.bool, device=device)
    return torch.cat([old, fresh], 1)


def ranks(ids: Tensor) -> Tensor:
    """For each token the number of earlier tokens of its row with the same id; `[B, L]`, `O(L log L)`."""
    order = torch.argsort(ids, dim=1, stable=True)
    ordered = ids.gather(1, order)
    first = torch.searchsorted(ordered.contiguous(), ordered.contiguous())  # start of each run of equal ids
    rank = torch.arange(ids.shape[1], device=ids.device) - first
    return torch.empty_like(rank).scatter_(1, order, rank)


def count_of(pool: Tensor, ids: Tensor) -> Tensor:
    """How many of `pool [B, n]` equal each of `ids [B, L]`; `[B, L]`."""
    ordered = pool.sort(dim=1).values.contiguous()
    expected = ids.contiguous()
    return torch.searchsorted(ordered, expected, right=True) - torch.searchsorted(ordered, expected)


def check_shape(
    subject: str, name: str, tensor: Tensor, shape: tuple[int, ...], words: str, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidInput(f"{subject}: {name} must be {words} = {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise InvalidInput(
            f"{subject}: {name} is on {tensor.device} and query on {device}; move it with .to(query.device)"
        )


def checked_allowed(mask: Tensor | None, v: Visibility, subject: str, stateful: bool) -> Tensor | None:
    """The bool mask with four axes; `InvalidInput` for another shape or device."""
    if mask is None:
        return None
    full = [v.batch, v.num_heads, v.query_length, v.key_length]
    got = list(mask.shape)
    if mask.dim() == 3:
        a, q, k = got
        raise InvalidInput(
            f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}; if its first axis is the batch add a "
            f"head axis (mask[:, None], [{a}, 1, {q}, {k}]), if it is the heads add a batch axis (mask[None], [1, {a}, {q}, {k}])"
        )
    if mask.dim() == 1:
        raise InvalidInput(
            f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}; if it marks keys pass key_mask= ([B, Lk]), "
            "if it marks queries pass mask=mask[None, None, :, None]"
        )
    if mask.dim() not in (2, 4):
        raise InvalidInput(f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}")
    four = mask[None, None] if mask.dim() == 2 else mask
    fits = all(have in (1, want) for have, want in zip(four.shape, full, strict=True))
    if mask.dim() == 2 and got != full[2:]:
        fits = False
    if not fits:
        extra = "; with a state the mask spans past and new keys" if stateful else ""
        raise InvalidInput(f"{subject}: mask must be [Lq, Lk] = {full[2:]} or broadcast to {full}, got {got}{extra}")
    if mask.device != v.device:
        raise InvalidInput(
            f"{subject}: mask is on {mask.device} and query on {v.device}; move it with .to(query.device)"
        )
    return four


def checked_mod(visible: Any, full: list[int], device: torch.device) -> Tensor:
    """What a mask_mod gave for a tile of shape `full`, bool, with the tile's rows and columns; `InvalidInput` where it is no such thing."""
    if isinstance(visible, bool):
        visible = torch.full((), visible, device=device)
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise InvalidInput(f"mask_mod must return bool, True = may attend, got {got}; use score_mod= to change scores")
    lead = [1] * (4 - visible.dim()) + list(visible.shape)
    if len(lead) != 4 or any(have not in (1, want) for have, want in zip(lead, full, strict=True)):
        raise InvalidInput(
            f"mask_mod must return bool that broadcasts to {full}, the shapes of b, h, q, k, got {list(visible.shape)}"
        )
    return visible.expand(*lead[:2], *full[2:])
