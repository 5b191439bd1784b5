"""Visibility: an AttentionMask met with the shapes of one call. Needs torch; handed to variants in `Call`.

Notation: B batch, H query heads, Lq queries, Lk keys (past ones included, where there is a state).
Query `i` stands at `i + offset`, key `j` at `j`; in segments both restart. Nothing here reads the value of
a tensor: positions and comparisons stay on the device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.errors import InvalidInput
from attnlab.mask import AttentionMask, MaskMod

_FAR = 1 << 62


class Visibility:
    """Who sees whom in one call, by tiles or whole.

    `key_present [B, Lk]` and `query_present [B, Lq]` (or None: all) are the absent slots; the gate has
    already cleaned them and zeroes the rows of absent queries afterwards, so `tile` and `dense` speak of
    present queries only. `offset` is an int, an integer tensor `[B]`, or `[B, Lq]` inside segments.
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
        "left",
        "mask_mod",
        "num_heads",
        "offset",
        "query_length",
        "query_present",
        "query_segments",
        "right",
    )

    def __init__(
        self, batch: int, num_heads: int, query_length: int, key_length: int, device: torch.device
    ) -> None:
        self.batch, self.num_heads, self.device = batch, num_heads, device
        self.query_length, self.key_length = query_length, key_length
        self.left: int | None = None
        self.right: int | None = None
        self.offset: int | Tensor = 0
        self.key_present: Tensor | None = None
        self.query_present: Tensor | None = None
        self.query_segments: Tensor | None = None
        self.key_segments: Tensor | None = None
        self.allowed: Tensor | None = None
        self.mask_mod: MaskMod | None = None
        self._query_positions: Tensor | None = None
        self._key_positions: Tensor | None = None

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
        v.allowed = _checked_allowed(mask.allowed, v, subject)
        v.mask_mod = mask.mask_mod
        key_mask = mask.key_mask
        if key_mask is not None:
            _check_shape(subject, "key_mask", key_mask, (batch, new_length), "[B, Lk]", device)
        for name, lengths in (("key_lengths", mask.key_lengths), ("query_lengths", mask.query_lengths)):
            if lengths is not None:
                _check_shape(subject, name, lengths, (batch,), "[B]", device)
        if mask.key_lengths is not None:
            counted = torch.arange(new_length, device=device) < mask.key_lengths[:, None]  # [B, new]
            key_mask = counted if key_mask is None else key_mask & counted
        if mask.query_lengths is not None:
            v.query_present = (
                torch.arange(query_length, device=device) < mask.query_lengths[:, None]
            )  # [B, Lq]
        if mask.segments is not None:
            query_ids, key_ids = (_broadcast_rows(ids, batch) for ids in mask.segments)
            _check_shape(subject, "segments query_ids", query_ids, (batch, query_length), "[B, Lq]", device)
            _check_shape(subject, "segments key_ids", key_ids, (batch, new_length), "[B, Lk]", device)
            present = query_ids >= 0
            v.query_present = present if v.query_present is None else v.query_present & present
            key_mask = key_ids >= 0 if key_mask is None else key_mask & (key_ids >= 0)
            v.query_segments = query_ids
            v.key_segments = (
                key_ids
                if not past
                else torch.cat([_past_ids(past_segments, batch, past, device), key_ids], 1)
            )
        elif past_segments is not None:
            raise InvalidInput(
                f"{subject}: the state holds segments, so its new tokens need segments= as well"
            )
        v.key_present = _with_past(key_mask, past_present, batch, past or 0, new_length, device)
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
                self.offset = _count_of(self.key_segments[:, :past], self.query_segments)  # [B, Lq]
            else:
                self.offset = past or 0
        elif offset == "top_left" if isinstance(offset, str) else False:
            self.offset = 0
        elif isinstance(offset, str):
            self.offset = self._bottom_right(mask, past or 0)
        elif isinstance(offset, Tensor):
            if offset.dim() == 1:
                _check_shape(subject, "offset", offset, (self.batch,), "[B]", self.device)
            elif offset.device != self.device and offset.dim() == 0:
                offset = offset.to(self.device)
            self.offset = offset.expand(self.batch)
        else:
            assert not isinstance(offset, str)
            self.offset = offset

    def _bottom_right(self, mask: AttentionMask, past: int) -> int | Tensor:
        if self.query_segments is not None:
            assert self.key_segments is not None
            keys = _count_of(self.key_segments, self.query_segments)  # [B, Lq]
            return keys - _count_of(self.query_segments, self.query_segments)
        if mask.key_lengths is None and mask.query_lengths is None:
            return self.key_length - self.query_length
        keys_of: int | Tensor = self.key_length if mask.key_lengths is None else mask.key_lengths + past
        queries_of: int | Tensor = self.query_length if mask.query_lengths is None else mask.query_lengths
        return keys_of - queries_of  # [B]

    def _drop_what_hides_nothing(self) -> None:
        """Bounds on positions that no pair can violate are dropped: a decoding step becomes plain."""
        if isinstance(self.offset, int) and self.query_segments is None:
            if self.right is not None and self.offset + self.right >= self.key_length - 1:
                self.right = None
            if self.left is not None and self.query_length - 1 + self.offset - self.left <= 0:
                self.left = None

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
                own = _ranks(self.query_segments)  # [B, Lq]
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
                self._key_positions = _ranks(self.key_segments)
            else:
                self._key_positions = torch.arange(self.key_length, device=self.device)
        return self._key_positions

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """The keys `[first, last)` that queries `[start, stop)` could see, from numbers alone."""
        if not isinstance(self.offset, int) or self.query_segments is not None:
            return 0, self.key_length
        first = 0 if self.left is None else max(0, start + self.offset - self.left)
        last = (
            self.key_length
            if self.right is None
            else min(self.key_length, stop - 1 + self.offset + self.right + 1)
        )
        return first, max(first, last)

    def kind(self, q0: int, q1: int, k0: int, k1: int) -> Literal["empty", "full", "partial"]:
        """What is known of a tile without looking at tensors; `partial` where it must be looked at."""
        first, last = self.key_range(q0, q1)
        if k0 >= last or k1 <= first:
            return "empty"
        if self.pairwise or self.key_present is not None:
            if self.allowed is not None or self.mask_mod is not None or self.key_present is not None:
                return "partial"
            if not isinstance(self.offset, int) or self.query_segments is not None:
                return "partial"
            low = -_FAR if self.left is None else q1 - 1 + self.offset - self.left
            high = _FAR if self.right is None else q0 + self.offset + self.right
            return "full" if k0 >= low and k1 - 1 <= high else "partial"
        return "full"

    def blocks(self, query_block: int, key_block: int) -> list[list[str]]:
        """`kind` of every tile of a grid: rows of query blocks, each a list over key blocks."""
        return [
            [
                self.kind(q, min(q + query_block, self.query_length), k, min(k + key_block, self.key_length))
                for k in range(0, self.key_length, key_block)
            ]
            for q in range(0, self.query_length, query_block)
        ]

    def dense(self) -> Tensor:
        """The whole mask, bool, broadcastable to `[B, H, Lq, Lk]`."""
        tile = self.tile(0, self.query_length, 0, self.key_length)
        if tile is None:
            return torch.ones(1, 1, self.query_length, self.key_length, dtype=torch.bool, device=self.device)
        return tile.expand(*tile.shape[:2], self.query_length, self.key_length)

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
        """Visibility of queries `[q0, q1)` to keys `[k0, k1)`: bool, broadcastable, or None where all is visible."""
        rules: list[Tensor] = []
        if self.positional and self.kind(q0, q1, k0, k1) != "full":
            q = _rows(self.query_positions, q0, q1)[..., :, None]  # [B|1, 1, tq, 1]
            k = _rows(self.key_positions, k0, k1)[..., None, :]  # [B|1, 1, 1, tk]
            if self.right is not None:
                rules.append(k <= q + self.right if self.right else k <= q)
            if self.left is not None:
                rules.append(k >= q - self.left)
        if self.query_segments is not None and self.key_segments is not None:
            rules.append(self.query_segments[:, None, q0:q1, None] == self.key_segments[:, None, None, k0:k1])
        if self.key_present is not None:
            rules.append(self.key_present[:, None, None, k0:k1])
        if self.allowed is not None:
            rules.append(_slice(_slice(self.allowed, 2, q0, q1), 3, k0, k1))
        if self.mask_mod is not None:
            rules.append(self._modified(q0, q1, k0, k1))
        if not rules:
            return None
        seen = rules[0]
        for rule in rules[1:]:
            seen = seen & rule
        return seen

    def _modified(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        assert self.mask_mod is not None
        seen: Any = self.mask_mod(*self.indices(q0, q1, k0, k1))
        if isinstance(seen, bool):
            seen = torch.full((1, 1, 1, 1), seen, device=self.device)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise InvalidInput(
                f"mask_mod must return bool, True = may attend, got {got}; use score_mod= to change scores"
            )
        return (
            seen.expand(*seen.shape[:-2], q1 - q0, k1 - k0)
            if seen.dim() >= 2
            else seen.expand(q1 - q0, k1 - k0)
        )

    def indices(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(b, h, q, k)` for `mask_mod` and `score_mod`: integer tensors that broadcast to `[B, H, tq, tk]`."""
        b = torch.arange(self.batch, device=self.device)[:, None, None, None]
        h = torch.arange(self.num_heads, device=self.device)[None, :, None, None]
        q = _rows(self.query_positions, q0, q1)[..., :, None]
        k = _rows(self.key_positions, k0, k1)[..., None, :]
        return b, h, q, k


def _rows(positions: Tensor, start: int, stop: int) -> Tensor:
    """`[1, 1, n]` or `[B, 1, n]` of positions `[L]` or `[B, L]`."""
    part = positions[..., start:stop]
    return part[None, None] if part.dim() == 1 else part[:, None]


def _slice(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, start, stop - start)


def _broadcast_rows(ids: Tensor, batch: int) -> Tensor:
    return ids.expand(batch, -1) if ids.shape[0] == 1 else ids


def _past_ids(past_segments: Tensor | None, batch: int, past: int, device: torch.device) -> Tensor:
    if past_segments is not None:
        return past_segments
    raise InvalidInput(
        "segments: the state holds tokens without segments; start a new state for packed input"
    )


def _with_past(
    new: Tensor | None,
    past_present: Tensor | None,
    batch: int,
    past: int,
    new_length: int,
    device: torch.device,
) -> Tensor | None:
    if not past or (new is None and past_present is None):
        return new if not past else None
    old = (
        past_present if past_present is not None else torch.ones(batch, past, dtype=torch.bool, device=device)
    )
    fresh = new if new is not None else torch.ones(batch, new_length, dtype=torch.bool, device=device)
    return torch.cat([old, fresh], 1)


def _ranks(ids: Tensor) -> Tensor:
    """For each token the number of earlier tokens of its row with the same id; `[B, L]`, `O(L log L)`."""
    order = torch.argsort(ids, dim=1, stable=True)
    ordered = ids.gather(1, order)
    first = torch.searchsorted(ordered.contiguous(), ordered.contiguous())  # start of each run of equal ids
    rank = torch.arange(ids.shape[1], device=ids.device) - first
    return torch.empty_like(rank).scatter_(1, order, rank)


def _count_of(pool: Tensor, ids: Tensor) -> Tensor:
    """How many of `pool [B, n]` equal each of `ids [B, L]`; `[B, L]`."""
    ordered = pool.sort(dim=1).values.contiguous()
    wanted = ids.contiguous()
    return torch.searchsorted(ordered, wanted, right=True) - torch.searchsorted(ordered, wanted)


def _check_shape(
    subject: str, name: str, tensor: Tensor, shape: tuple[int, ...], words: str, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidInput(f"{subject}: {name} must be {words} = {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise InvalidInput(
            f"{subject}: {name} is on {tensor.device} and query on {device}; move it with .to(query.device)"
        )


def _checked_allowed(mask: Tensor | None, v: Visibility, subject: str) -> Tensor | None:
    """The bool mask with four axes, after its shape and device were judged."""
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
            "if it marks queries pass mask=mask[:, None]"
        )
    if mask.dim() not in (2, 4):
        raise InvalidInput(f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}")
    four = mask[None, None] if mask.dim() == 2 else mask
    fits = all(have in (1, want) for have, want in zip(four.shape, full, strict=True))
    if mask.dim() == 2 and got != full[2:]:
        fits = False
    if not fits:
        extra = "; the mask spans past and new keys" if v.key_length != v.query_length else ""
        raise InvalidInput(
            f"{subject}: mask must be [Lq, Lk] = {full[2:]} or broadcast to {full}, got {got}{extra}"
        )
    if mask.device != v.device:
        raise InvalidInput(
            f"{subject}: mask is on {mask.device} and query on {v.device}; move it with .to(query.device)"
        )
    return four
