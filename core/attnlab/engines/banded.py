"""Softmax attention inside a band: time and memory proportional to `Lq` times the window, forward and backward. Needs torch.

Queries are cut into blocks of `side` rows; block n reads the `width` keys that its rows could see, a view of the keys with
overlapping strides, so nothing is gathered. Sink tokens (Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks") are the first keys, which stay in sight when the window has left them: a few more columns. Backward computes the weights
again from query and key; gradients of overlapping blocks are added by shifted slices.

Notation: N = B Hkv; G query heads a key head; R = G side rows; b left, r right bound; p positions of queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnlab.engines.fused import asks_for_out_alone
from attnlab.engines.heads import accumulation_dtype, fold_groups, in_own_precision
from attnlab.visibility.resolved import leading_absent

if TYPE_CHECKING:
    from attnlab.call import Call

SIDE = 32
# Scores of the blocks that are worked on together: 2^20 float32 are 4 MiB. Larger groups leave the caches, which doubles the time on a
# quiet machine; smaller ones make threads wait for each other after each product, which does so on a busy one.
GROUP_ELEMENTS = 1 << 20
GROUP_ELEMENTS_ON_GPU = 1 << 25
# Below this many pairs of a head, and where the band is most of the matrix, torch's function with a mask is quicker.
WORTHWHILE_PAIRS = 1 << 18


class Band(NamedTuple):
    """Where the band lies: query i stands at `i + offset` and sees keys from `- left` to `+ right` of that, and sink tokens.

    padded: whether items may begin with padded keys, behind which their sink tokens stand.
    """

    left: int
    right: int
    offset: int
    sink_tokens: int
    padded: bool = False


def band_of(call: Call, query: Tensor, key: Tensor) -> Band | None:
    """The band of a request whose only rules are a window on both sides and padded keys; None for any further rule.

    None as well where torch's function is quicker (short inputs), and under torch.compile.
    """
    visibility = call.visibility
    if (
        visibility is None
        or visibility.left is None
        or visibility.right is None
        or not isinstance(visibility.offset, int)
    ):
        return None
    if visibility.allowed is not None or visibility.mask_mod is not None or visibility.query_segments is not None:
        return None
    if visibility.strict_left is not None:
        return None
    if call.bias is not None or not asks_for_out_alone(call) or torch.compiler.is_compiling():
        return None
    lq, lk = query.shape[2], key.shape[2]
    reach = visibility.left + visibility.right + SIDE + visibility.sink_tokens
    if lq < SIDE or 2 * reach > lk or lq * lk < WORTHWHILE_PAIRS or query.numel() == 0:
        return None
    if not 0 <= visibility.offset <= lk - lq:
        return None  # rows beyond the keys: rare, and left to engines that need no room around them
    padded = bool(visibility.sink_tokens) and visibility.padded_left and visibility.key_present is not None
    return Band(visibility.left, visibility.right, visibility.offset, visibility.sink_tokens, padded)


@in_own_precision
def banded_attention(
    query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float, present: Tensor | None
) -> Tensor:
    """`out [B, Hq, Lq, Dv]` in the accumulation dtype, for `query [B, Hq, Lq, D]`, `key [B, Hkv, Lk, D]`, `value [B, Hkv, Lk, Dv]`.

    present: bool `[B, Lk]`, None where every key is there. A query that sees nothing gives 0.
    """
    wide = accumulation_dtype(query.dtype)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    if torch.is_grad_enabled():
        out: Tensor = _Banded.apply(q, k, v, band, scale, present)  # type: ignore[no-untyped-call]
        return out
    return _Blocks(q, k, v, band, scale, present).forward()


class _Banded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float, present: Tensor | None) -> Tensor:
        return _Blocks(query, key, value, band, scale, present).forward()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, key, value, ctx.band, ctx.scale, present = inputs
        ctx.save_for_backward(query, key, value, present, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, present, out = ctx.saved_tensors
        return (*_backward(grad, query, key, value, out, ctx.band, ctx.scale, present), None, None, None)


@in_own_precision
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    band: Band,
    scale: float,
    present: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _Blocks(query, key, value, band, scale, present).backward(grad.to(query.dtype), out)


class _Blocks:
    """One call cut into blocks: padded keys and values, and what hides inside and at the ends of the band."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float, present: Tensor | None
    ) -> None:
        self.band, self.scale, self.shape = band, scale, query.shape
        self.kv_heads, self.lk = key.shape[1], key.shape[2]
        self.groups = query.shape[1] // key.shape[1]
        side = self.side = SIDE
        self.count = -(-query.shape[2] // side)
        self.width = -(-(side + band.left + band.right) // side) * side  # in whole sides, so that slices add up
        self.before = self.width - side - band.right  # keys of a block before its first query's own position
        self.pads = (
            self.before - band.offset,
            (self.count - 1) * side + self.width - (self.before - band.offset) - self.lk,
        )
        self.cuts = self._cuts(query.device)
        self.rows = self._rows(query)  # [N, count, R, D]
        self.keys, self.values = key.flatten(0, 1), value.flatten(0, 1)  # [N, Lk, D]
        # Which keys are the sink tokens of each sequence, [B, sinks]; past the last key where a row has too few.
        self.sinks = torch.arange(band.sink_tokens, device=query.device)[None].expand(key.shape[0], -1)
        if band.padded and present is not None:
            self.sinks = self.sinks + leading_absent(present)[:, None]
        self.first_keys, self.first_values = self._first(key), self._first(value)  # [N, sinks, D]
        self.present = present
        self.there = None if present is None else torch.nn.functional.pad(present, self.pads)  # [B, padded]
        at, column = (torch.arange(side, device=query.device)[:, None], torch.arange(self.width, device=query.device))
        apart = column - at - self.before  # [side, width]: how far a key stands behind its query
        hidden = (apart < -band.left) | (apart > band.right)
        self.outside = torch.zeros(side, self.width, dtype=query.dtype, device=query.device).masked_fill(
            hidden, -torch.inf
        )
        self.outside = self.outside.repeat(self.groups, 1)  # [R, width]

    def _first(self, x: Tensor) -> Tensor:
        """Of keys or values those of the sink tokens, `[N, sinks, W]`."""
        if not self.band.padded:
            return x[:, :, : self.band.sink_tokens].flatten(0, 1)
        index = self.sinks.clamp(max=self.lk - 1)[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """`[B, Hq, Lq, W]` -> `[N, count, G side, W]`, the last block filled up with zeros."""
        batch, _, lq, width = x.shape
        x = torch.nn.functional.pad(x, (0, 0, 0, self.count * self.side - lq))
        x = fold_groups(x, self.kv_heads).reshape(batch * self.kv_heads, self.groups, self.count, self.side, width)
        return x.transpose(1, 2).reshape(batch * self.kv_heads, self.count, self.groups * self.side, width)

    def _unrowed(self, x: Tensor) -> Tensor:
        """The reverse of `_rows`."""
        batch, heads, lq, _ = self.shape
        x = x.reshape(-1, self.count, self.groups, self.side, x.shape[-1]).transpose(1, 2)
        return x.reshape(batch, heads, self.count * self.side, x.shape[-1])[:, :, :lq]

    def _cuts(self, device: torch.device) -> list[tuple[int, int]]:
        """Blocks `[first, last)` that are worked on together; those that read past the keys' ends are apart from the others."""
        budget = GROUP_ELEMENTS if device.type == "cpu" else GROUP_ELEMENTS_ON_GPU
        several = max(1, budget // (self.groups * self.side * (self.width + self.band.sink_tokens)))
        begins = max(0, -(-self.pads[0] // self.side))  # blocks that begin before the first key
        ends = max(begins, self.count - max(0, -(-self.pads[1] // self.side)))  # the first that ends past the last
        return [
            (start, min(start + several, stop))
            for begin, stop in ((0, min(begins, self.count)), (begins, ends), (ends, self.count))
            for start in range(begin, stop, several)
        ]

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """The keys `[start, stop)` that blocks `[first, last)` read; some may lie before the first or past the last."""
        start = first * self.side - self.pads[0]
        return start, start + (last - first - 1) * self.side + self.width

    def _columns(self, x: Tensor, firsts: Tensor, n: int, first: int, last: int) -> Tensor:
        """What blocks `[first, last)` read of keys or values: `[blocks, W, sinks + width]`."""
        start, stop = self._span(first, last)
        part = x[n, max(start, 0) : max(stop, 0)]
        if start < 0 or stop > self.lk:
            part = torch.nn.functional.pad(part, (0, 0, *self._missing(start, stop)))
        part = part.unfold(0, self.width, self.side)
        if not self.band.sink_tokens:
            return part
        front = firsts[n].transpose(0, 1).expand(last - first, -1, -1)
        return torch.cat([front, part], -1)

    def _missing(self, start: int, stop: int) -> tuple[int, int]:
        """How many of keys `[start, stop)` lie before the first and past the last."""
        before = min(max(-start, 0), stop - start)
        return before, min(max(stop - self.lk, 0), stop - start - before)

    def _weights(self, n: int, first: int, last: int, keys: Tensor) -> Tensor:
        """Weights `[blocks, R, sinks + width]`; the row of a query that sees nothing is 0."""
        blocks = last - first
        hide = self.outside
        start, stop = self._span(first, last)
        if self.there is not None or start < 0 or stop > self.lk:
            hide = hide.masked_fill(~self._there(n, first, last)[:, None, :], -torch.inf)  # [blocks, R, width]
        if self.band.sink_tokens:
            ahead = hide.new_zeros(blocks, hide.shape[-2], self.band.sink_tokens)
            ahead = ahead.masked_fill(~self._sinks_seen(n, first, last), -torch.inf)
            hide = torch.cat([ahead, hide.expand(blocks, -1, -1)], -1)
        s = torch.baddbmm(hide.expand(blocks, -1, -1), self.rows[n, first:last], keys, alpha=self.scale)
        if self.there is None and last * self.side <= self.shape[2]:  # every query sees its own key
            return torch.softmax(s, -1)
        sees = (s != -torch.inf).any(-1, keepdim=True)
        # Zeros go in as well: the softmax of a row of -inf is NaN, and so would be its derivatives.
        return torch.where(sees, torch.softmax(torch.where(sees, s, 0), -1), 0)

    def _there(self, n: int, first: int, last: int) -> Tensor:
        """Which keys of blocks exist and are present: bool `[blocks, width]`."""
        device = self.rows.device
        at = torch.arange(first, last, device=device)[:, None] * self.side - self.pads[0]
        at = at + torch.arange(self.width, device=device)  # [blocks, width]: indices of keys
        inside = (at >= 0) & (at < self.lk)
        if self.there is None:
            return inside
        row = self.there[n // self.kv_heads, first * self.side : (last - 1) * self.side + self.width]
        return inside & row.unfold(0, self.width, self.side)

    def _sinks_seen(self, n: int, first: int, last: int) -> Tensor:
        """Which sink tokens a query sees that its window has left: bool `[blocks, R, sinks]`."""
        device = self.rows.device
        at = torch.arange(first * self.side, last * self.side, device=device).view(-1, self.side, 1)
        sinks = self.sinks[n // self.kv_heads]
        left = sinks < at + (self.band.offset - self.band.left)  # [blocks, side, sinks]
        if self.present is not None:
            there = self.present[n // self.kv_heads]
            left = left & there[sinks.clamp(max=self.lk - 1)] & (sinks < self.lk)
        return left.repeat(1, self.groups, 1)

    def forward(self) -> Tensor:
        whole = self.rows.new_empty(*self.rows.shape[:3], self.values.shape[-1])
        in_place = torch._C._functorch.maybe_current_level() is None  # vmap knows no `out=`
        pieces = []
        for n in range(self.rows.shape[0]):
            for first, last in self.cuts:
                p = self._weights(n, first, last, self._columns(self.keys, self.first_keys, n, first, last))
                values = self._columns(self.values, self.first_values, n, first, last).transpose(1, 2)
                if in_place:
                    torch.bmm(p, values, out=whole[n, first:last])
                else:
                    pieces.append(p @ values)
        return self._unrowed(whole if in_place else torch.cat(pieces).view(whole.shape))

    def backward(self, grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        grads, outs = self._rows(grad), self._rows(out)
        delta = (grads * outs).sum(-1, keepdim=True)  # [N, count, R, 1]
        for_rows, for_keys, for_values = [], [], []
        for n in range(self.rows.shape[0]):
            key_columns, value_columns = [], []
            for first, last in self.cuts:
                keys = self._columns(self.keys, self.first_keys, n, first, last)
                values = self._columns(self.values, self.first_values, n, first, last)
                p = self._weights(n, first, last, keys)
                g = grads[n, first:last]
                slopes = p * (g @ values - delta[n, first:last]) * self.scale
                for_rows.append(slopes @ keys.transpose(1, 2))
                key_columns.append(slopes.transpose(1, 2) @ self.rows[n, first:last])
                value_columns.append(p.transpose(1, 2) @ g)
            for_keys.append(self._added(n, torch.cat(key_columns)))
            for_values.append(self._added(n, torch.cat(value_columns)))
        query = self._unrowed(torch.cat(for_rows).view(self.rows.shape))
        key, value = (torch.stack(x).view(self.shape[0], self.kv_heads, self.lk, -1) for x in (for_keys, for_values))
        return query, key, value

    def _added(self, n: int, columns: Tensor) -> Tensor:
        """`[count, sinks + width, W]`, what each block gives the keys that it reads -> `[Lk, W]`, added up by key."""
        side, sinks = self.side, self.band.sink_tokens
        total = columns.new_zeros(1, 1).expand(self.lk, columns.shape[-1]) + columns[:0].sum()
        for step in range(self.width // side):
            start = step * side - self.pads[0]  # the key that the first row belongs to
            stop = start + self.count * side
            if stop > 0 and start < self.lk:  # not wholly before the first key, or past the last
                part = columns[:, sinks + step * side : sinks + (step + 1) * side].flatten(0, 1)
                total = total + torch.nn.functional.pad(part, (0, 0, start, self.lk - stop))
        if sinks:
            index = self.sinks[n // self.kv_heads].clamp(max=self.lk - 1)  # what is past the last key gives 0
            total = total.index_add(0, index, columns[:, :sinks].sum(0))
        return total
