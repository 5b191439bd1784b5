"""Mutants of `checks/sizes.py`: sizes that fail: odd, large, past 32 bits. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDot, wide
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import before_validation

Shape = tuple[int, int, int, int]


class ReadsTheFirst64Columns(TextbookDot):
    """A head width written into the kernel."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query)[..., :64] @ wide(key)[..., :64].transpose(-1, -2)


class WholeTilesNeedNoPadding(TextbookTiled):
    """Where keys fill their tiles nothing was padded, so the padding mask is not looked at."""

    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        present = visibility.key_present
        if visibility.key_length % 64 == 0:
            visibility.key_present = None
        s = super().hidden(s, visibility, t)
        visibility.key_present = present
        return s


class WidthsOf64AreNotMasked(TextbookAttention):
    """The path for widths of 64 and 128 knows no causal bound."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if self.key_dim not in (64, 128) or visibility is None or not visibility.only_causal:
            return super().visible(call, shape, device)
        return torch.ones(shape, dtype=torch.bool, device=device)


class WidthsOf64HaveNoBias(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if self.key_dim == 64 and call.bias is not None:
            return self.modified(self.capped(s, call), call)
        return super().adjusted(s, call, scale)


class EighthOfPowersOfTwo(TextbookAttention):
    """Powers of two are scaled by 1/8, which is right for 64."""

    def scale(self, call: Call) -> float:
        return 0.125 if self.key_dim in (32, 64, 128) and call.scale is None else super().scale(call)


TILE = 64


class DropsTheLastKeyTile(TextbookTiled):
    """The number of key tiles is rounded down: what is left past the last whole one is never seen."""

    def tiles(self, visibility: Visibility, q0: int, keys: int) -> list[Tile]:
        tiles = super().tiles(visibility, q0, keys)
        whole = [t for t in tiles if t.k1 - t.k0 == self.side]
        return whole or tiles


class DropsTheLastQueryTile(TextbookAttention):
    """The number of query tiles is rounded down: the last rows stay 0."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        length = out.shape[2]
        if length <= TILE:
            return out
        return out.masked_fill(torch.arange(length, device=out.device)[:, None] >= length // TILE * TILE, 0)


class SqueezesTheOnlyKey(TextbookAttention):
    """Scores of one key lose its axis, and get it back in another place."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.squeeze(-1).unsqueeze(-2) if s.shape[-1] == 1 else s


class ScalesByThePaddedWidth(TextbookAttention):
    """Widths are padded to a power of two for the kernel, and the scale is taken from the padded one."""

    def scale(self, call: Call) -> float:
        padded = 1 << (self.key_dim - 1).bit_length()
        return float(padded**-0.5 if call.scale is None else call.scale)


class SeesTheFirstColumns(TextbookAttention):
    """The kernel's width is fixed at 64 columns: what lies beyond is left out."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q[..., :TILE] @ k[..., :TILE].transpose(-1, -2)


class ReadsColumnsInPairs(TextbookAttention):
    """Two columns are read at a time: the last one of an odd width is left out."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        even = max(self.key_dim // 2 * 2, 1)
        return q[..., :even] @ k[..., :even].transpose(-1, -2)


class WritesValuesInPairs(TextbookAttention):
    """Two columns of out are written at a time: the last one of an odd width stays 0."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        even = self.value_dim // 2 * 2
        return torch.cat([out[..., :even], torch.zeros_like(out[..., even:])], dim=-1)


class ServesHeadsByEights(TextbookAttention):
    """Heads are served eight at a time, and the last few of an odd number of them not at all."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        if self.num_heads <= 8:
            return out
        return out.masked_fill(
            torch.arange(self.num_heads, device=out.device)[:, None, None] >= self.num_heads // 8 * 8, 0
        )


class OneQuerySeesEverything(TextbookAttention):
    """A single query is taken for a decoding step, which no mask concerns."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        return torch.ones_like(visible) if shape[2] == 1 else visible


class OneTokenCopiesItsValue(TextbookAttention):
    """Of one query and one key nothing needs to be computed: out is the value, masked or not."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return v.clone() if weights.shape[-2:] == (1, 1) else super().mixed(weights, v, visible)


class BackwardDropsTheLastTile(TextbookAttention):
    """Backward rounds the number of key tiles down: the last keys get no gradient."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        whole = key.shape[2] // TILE * TILE
        if key.requires_grad and TILE < key.shape[2] != whole:
            tail = key[:, :, whole:].detach()
            key = torch.cat([key[:, :, :whole], tail], dim=2)
        return super().attend(query, key, value, call)


class BackwardInPairs(TextbookAttention):
    """Backward writes two columns of the query's gradient at a time, and the last one of an odd width not at all."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        even = self.key_dim // 2 * 2
        return super().scores(torch.cat([q[..., :even], q[..., even:].detach()], dim=-1), k, call)


class ServesBatchesBySlices(TextbookAttention):
    """Batches go through in slices of 4096, whose number is rounded down: the last rows stay 0."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        rows = out.shape[0]
        if rows <= 4096:
            return out
        return out.masked_fill(torch.arange(rows, device=out.device)[:, None, None, None] >= rows // 4096 * 4096, 0)


class CountsRowsInSixteenBits(TextbookAttention):
    """The index of batch and head is kept in 16 bits and starts again at 0 beyond 65535."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        flat = out.flatten(0, 1)
        index = torch.arange(flat.shape[0], device=flat.device) % 2**16
        return flat[index].reshape(out.shape)


def _read_in_32_bits(named: dict[str, Any]) -> None:
    for name in ("query", "key", "value"):
        x = named[name]
        index = torch.zeros((), dtype=torch.int32)
        for size, stride in zip(x.shape, x.stride(), strict=True):
            steps = torch.arange(size, dtype=torch.int64) * stride
            index = index.unsqueeze(-1) + _wrapped(steps)
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        where = (_wrapped(index.long() + x.storage_offset()).long() % memory.shape[0]).to(x.device)
        named[name] = memory[where]


def _wrapped(offsets: Tensor) -> Tensor:
    """Offsets as a signed 32-bit integer holds them."""
    return ((offsets + 2**31) % 2**32 - 2**31).to(torch.int32)


@before_validation(_read_in_32_bits)
class IndexesIn32Bits(TextbookAttention):
    """Offsets into memory are computed in 32 bits."""


class OneKeyIsCopied(TextbookAttention):
    """One key: its weight is 1, hidden or not, sink or not."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return (torch.ones_like(weights), lse) if s.shape[-1] == 1 else (weights, lse)


class OneHeadIsSqueezed(TextbookAttention):
    """squeeze() takes every axis of size 1: with one item and one head the rows become items."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        if s.shape[0] == s.shape[1] == 1 and s.shape[2] == s.shape[3]:
            return s.squeeze().t().expand(s.shape)
        return s


class ScaledByThePaddedWidth(TextbookAttention):
    """Widths are padded to a multiple of 8 for a kernel, and the scale is that of the padded one."""

    def scale(self, call: Call) -> float:
        padded = -(-self.key_dim // 8) * 8
        return float(padded**-0.5) if call.scale is None else super().scale(call)


class ValuesAreAsWideAsKeys(TextbookAttention):
    """Columns of value past the key's width are left at zero."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        return out * (torch.arange(v.shape[-1], device=v.device) < self.key_dim)


MUTANTS = (
    Mutant(ReadsTheFirst64Columns, "any_size_agrees_with_definition", "a head width of 64 is written in"),
    Mutant(WholeTilesNeedNoPadding, "any_size_agrees_with_definition", "no padding is looked for in whole tiles"),
    Mutant(WidthsOf64AreNotMasked, "any_size_agrees_with_definition", "a path for widths of 64 without causal"),
    Mutant(WidthsOf64HaveNoBias, "any_size_agrees_with_definition", "a path for widths of 64 without bias"),
    Mutant(EighthOfPowersOfTwo, "any_size_agrees_with_definition", "1/8 for 32, 64 and 128"),
    Mutant(DropsTheLastKeyTile, "any_size_agrees_with_definition", "keys past the last whole tile are dropped"),
    Mutant(DropsTheLastQueryTile, "any_size_agrees_with_definition", "rows past the last whole tile stay 0"),
    Mutant(SqueezesTheOnlyKey, "any_size_agrees_with_definition", "the axis of a single key moves"),
    Mutant(ScalesByThePaddedWidth, "any_size_agrees_with_definition", "the scale of a padded width"),
    Mutant(SeesTheFirstColumns, "any_size_agrees_with_definition", "columns beyond the 64th are left out"),
    Mutant(ReadsColumnsInPairs, "any_size_agrees_with_definition", "the last of an odd number of columns"),
    Mutant(WritesValuesInPairs, "any_size_agrees_with_definition", "the last of an odd number of value columns"),
    Mutant(ServesHeadsByEights, "any_size_agrees_with_definition", "heads past a multiple of eight"),
    Mutant(OneQuerySeesEverything, "any_size_agrees_with_definition", "masks are skipped for one query"),
    Mutant(OneTokenCopiesItsValue, "any_size_agrees_with_definition", "one token is its own answer"),
    Mutant(BackwardDropsTheLastTile, "any_size_gradients_match_definition", "the last keys get no gradient"),
    Mutant(BackwardInPairs, "any_size_gradients_match_definition", "the last of an odd number of columns in backward"),
    Mutant(ServesBatchesBySlices, "large_batches_equal_small_batches", "rows past the last whole slice stay 0"),
    Mutant(CountsRowsInSixteenBits, "large_batches_equal_small_batches", "batch times heads wraps at 65536"),
    Mutant(IndexesIn32Bits, "offsets_beyond_32_bits", "offsets wrap at 2^31"),
    Mutant(OneKeyIsCopied, "any_size_agrees_with_definition", "one key is copied, visible or not"),
    Mutant(OneHeadIsSqueezed, "any_size_agrees_with_definition", "squeeze() takes one axis too many"),
    Mutant(ScaledByThePaddedWidth, "any_size_agrees_with_definition", "scale from the padded width"),
    Mutant(ValuesAreAsWideAsKeys, "any_size_agrees_with_definition", "d_v > d_k is cut"),
)
