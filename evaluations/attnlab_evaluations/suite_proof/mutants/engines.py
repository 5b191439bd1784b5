"""Mutants of a tiled engine's forward: what passes from tile to tile, and where tiles begin and end. Needs torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab.visibility import Visibility
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant
from attnlab_evaluations.suite_proof.mutants._tiled import Saved, TextbookTiled, Tile

Row = tuple[Tensor, Tensor, Tensor]


class KeepsTheOldNumerator(TextbookTiled):
    """The sum of weights is rescaled when the maximum grows, the sum of values is not."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, *rest: Any) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, *rest)
        fade = torch.exp(m - torch.where(higher > -torch.inf, higher, 0))
        return higher, new_z, new_n - n * fade + n


class KeepsTheOldSum(TextbookTiled):
    def joined(self, m: Tensor, z: Tensor, n: Tensor, *rest: Any) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, *rest)
        fade = torch.exp(m - torch.where(higher > -torch.inf, higher, 0))
        return higher, new_z - z * fade + z, new_n


class MaximumOfTheTile(TextbookTiled):
    """The last tile's maximum stands for the row's: a later tile of small scores blows the sums up."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        own = s.amax(-1, keepdim=True)
        base = torch.where(own > -torch.inf, own, 0)
        p = torch.exp(s - base)
        fade = torch.where(m > -torch.inf, torch.exp(m - base), 0)
        used = p * self.kept(p, call, seed, t) if call.dropout_p else p
        return torch.where(own > -torch.inf, own, m), z * fade + p.sum(-1, keepdim=True), n * fade + used @ v


class MaximumStartsAtZero(TextbookTiled):
    """Where all scores are far below 0 every exponential underflows."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        return super().joined(m.clamp(min=0), z, n, s, v, call, seed, t)


class DropsTheLastPartialTile(TextbookTiled):
    """range(0, keys // T * T, T), once there are whole tiles."""

    def reach(self, seen: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(seen, q0, q1)
        whole = (last - first) // self.side * self.side
        return first, first + whole if whole else last


class CountsThePaddingOfATile(TextbookTiled):
    """The last tile is filled up with zeros, whose scores of 0 take weight."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        missing = -s.shape[-1] % 32 if t.k1 == call_keys(call, t) and t.k0 else 0
        if missing:
            s = torch.nn.functional.pad(s, (0, missing), value=0.0)
            v = torch.nn.functional.pad(v, (0, 0, 0, missing))
        return super().joined(m, z, n, s, v, call, seed, t)


def call_keys(call: Call, t: Tile) -> int:
    return t.k1 if call.visibility is None else call.visibility.key_length


class SkipsTheDiagonalTile(TextbookTiled):
    """The causal bound is that of the row block's first row."""

    def reach(self, seen: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(seen, q0, q1)
        return (first, min(last, seen.key_range(q0, q0 + 1)[1])) if seen.right is not None else (first, last)


class WindowStartsAtATile(TextbookTiled):
    """The first tile of a window is rounded up to the next tile border."""

    def reach(self, seen: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(seen, q0, q1)
        return -(-first // self.side) * self.side, last


class HidesNothingInWholeTiles(TextbookTiled):
    """A tile below the diagonal is taken for fully visible, whatever else hides."""

    def hidden(self, s: Tensor, seen: Visibility, t: Tile) -> Tensor:
        if seen.right == 0 and isinstance(seen.offset, int) and t.k1 - 1 <= t.q0 + seen.offset and t.q0:
            return s
        return super().hidden(s, seen, t)


class EmptyTilesAreNaN(TextbookTiled):
    """exp(-inf - -inf) in a tile that hides all, before the first that does not."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, s, v, call, seed, t)
        spoiled = torch.where(higher > -torch.inf, 0.0, float("nan")) * bool(t.k0 or t.q0)
        return higher, new_z + spoiled, new_n + spoiled


class OneBiasForAllTiles(TextbookTiled):
    """The bias is read from its first columns in every tile that is not larger than the first."""

    def bias_part(self, bias: Tensor, t: Tile) -> Tensor:
        return super().bias_part(bias, t._replace(k0=0, k1=t.k1 - t.k0))


class BroadcastBiasIsCut(TextbookTiled):
    """A bias of one row is cut like one of all rows, so later row blocks read nothing of it."""

    def bias_part(self, bias: Tensor, t: Tile) -> Tensor:
        if bias.shape[2] == 1 and t.q0:
            return bias[:, :, t.q0 : t.q1, t.k0 : t.k1].sum(2, keepdim=True)
        return super().bias_part(bias, t)


class MaskOfTheTransposedTile(TextbookTiled):
    """Row and column of the mask's tile are swapped wherever there is such a tile."""

    def hidden(self, s: Tensor, seen: Visibility, t: Tile) -> Tensor:
        if seen.allowed is None or t.q0 == t.k0 or max(t.q1, t.k1) > min(seen.query_length, seen.key_length):
            return super().hidden(s, seen, t)
        if t.q1 - t.q0 != t.k1 - t.k0:
            return super().hidden(s, seen, t)
        return super().hidden(s, seen, Tile(t.k0, t.k1, t.q0, t.q1))


class SinksJoinEveryTile(TextbookTiled):
    def forward_row(
        self, call: Call, seen: Visibility, tiles: list[Tile], q0: int, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        sinks = None if saved.sinks is None else saved.sinks + math.log(max(len(tiles), 1))
        return super().forward_row(call, seen, tiles, q0, saved._replace(sinks=sinks))


class SinksAreNoReference(TextbookTiled):
    """exp(sink - m) with the maximum of the scores alone: a large sink overflows."""

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is None:
            return super().finished(m, z, n, sinks)
        alive = m > -torch.inf
        z = torch.where(alive, z + torch.exp(sinks[:, None, None] - m), 1)
        return torch.where(alive, n / z, 0), torch.where(alive, m + z.log(), -torch.inf)


class DropoutInTheNormaliser(TextbookTiled):
    """What is dropped is missing in the sum of weights too."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, s, v, call, seed, t)
        if not call.dropout_p:
            return higher, new_z, new_n
        p = torch.exp(s - torch.where(higher > -torch.inf, higher, 0))
        kept = (p * self.kept(p, call, seed, t)).sum(-1, keepdim=True)
        return higher, new_z - p.sum(-1, keepdim=True) + kept.clamp(min=1e-6), new_n


class OneSeedForAllTiles(TextbookTiled):
    def kept(self, p: Tensor, call: Call, seed: int, t: Tile) -> Tensor:
        return super().kept(p, call, seed, Tile(0, 0, 0, 0))


class OneSeedForTilesOfASum(TextbookTiled):
    """seed + q0 + k0: tiles on an antidiagonal share a mask."""

    def kept(self, p: Tensor, call: Call, seed: int, t: Tile) -> Tensor:
        return super().kept(p, call, seed, Tile(0, 0, t.q0 + t.k0, 0))


class HalfPrecisionAccumulators(TextbookTiled):
    """Between tiles the sums are stored in the inputs' dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        self.narrow_dtype = query.dtype
        return super().attend(query, key, value, call)

    def joined(self, m: Tensor, z: Tensor, n: Tensor, *rest: Any) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, *rest)
        return higher, new_z.to(self.narrow_dtype).to(z.dtype), new_n.to(self.narrow_dtype).to(n.dtype)


class LseInBaseTwo(TextbookTiled):
    """The log2 domain of a kernel leaks out."""

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = super().finished(m, z, n, sinks)
        return out, lse + torch.where(lse > -torch.inf, z.log2() - z.log(), 0)


class RoundedLog2OfE(TextbookTiled):
    """exp2(1.4427 x): four decimals of log2(e)."""

    def products(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().products(q, k, call) * (1.4427 * math.log(2))


class DeadRowsDivideByZero(TextbookTiled):
    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = super().finished(m, z, n, sinks)
        return torch.where(m > -torch.inf, out, n / z), lse


class EpsilonInTheNormaliser(TextbookTiled):
    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().finished(m, z + 1e-6, n, sinks)


class RowsOfTheNextTileRepeat(TextbookTiled):
    """The last row block is moved back to be whole, and its rows are written where the block would have been."""

    def forward_row(
        self, call: Call, seen: Visibility, tiles: list[Tile], q0: int, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().forward_row(call, seen, tiles, q0, saved)
        return (out.roll(1, 2), lse.roll(1, 2)) if q0 and out.shape[2] < self.side else (out, lse)


MUTANTS = (
    Mutant(KeepsTheOldNumerator, "agrees_with_definition", "the accumulator is not rescaled"),
    Mutant(KeepsTheOldSum, "agrees_with_definition", "the normaliser is not rescaled"),
    Mutant(MaximumOfTheTile, "agrees_on_special_contents", "a maximum per tile overflows the sums before it"),
    Mutant(MaximumStartsAtZero, "agrees_on_special_contents", "m = 0 where m = -inf is meant"),
    Mutant(DropsTheLastPartialTile, "agrees_with_definition", "keys past the last whole tile are lost"),
    Mutant(CountsThePaddingOfATile, "agrees_with_definition", "zeros that fill up a tile take weight"),
    Mutant(SkipsTheDiagonalTile, "agrees_with_definition", "the causal loop ends one tile early"),
    Mutant(WindowStartsAtATile, "long_inputs_agree_by_rows", "a window's first partial tile is skipped"),
    Mutant(HidesNothingInWholeTiles, "agrees_with_definition", "padding is not looked at below the diagonal"),
    Mutant(EmptyTilesAreNaN, "long_inputs_agree_by_rows", "-inf - -inf where a whole tile is hidden"),
    Mutant(OneBiasForAllTiles, "agrees_with_definition", "the bias pointer is not advanced"),
    Mutant(BroadcastBiasIsCut, "agrees_with_definition", "a broadcast axis is advanced"),
    Mutant(MaskOfTheTransposedTile, "agrees_with_definition", "the mask's tile is read transposed"),
    Mutant(SinksJoinEveryTile, "agrees_with_definition", "a sink is added once a tile"),
    Mutant(SinksAreNoReference, "agrees_at_the_ends_of_arguments", "a large sink overflows"),
    Mutant(DropoutInTheNormaliser, "dropout_leaves_weights_and_lse_alone", "the normaliser sums what was kept"),
    Mutant(OneSeedForAllTiles, "dropout_masks_are_independent", "every tile draws one mask"),
    Mutant(OneSeedForTilesOfASum, "dropout_masks_are_independent", "seed + q0 + k0"),
    Mutant(HalfPrecisionAccumulators, "sums_are_taken_in_float32", "sums between tiles in half precision"),
    Mutant(LseInBaseTwo, "lse_matches_definition", "lse in base 2"),
    Mutant(RoundedLog2OfE, "agrees_with_definition", "log2(e) with four decimals"),
    Mutant(DeadRowsDivideByZero, "dead_rows_are_zero", "0 / 0 in rows that see nothing"),
    Mutant(EpsilonInTheNormaliser, "agrees_with_definition", "1e-6 beside the sum"),
    Mutant(RowsOfTheNextTileRepeat, "agrees_with_definition", "the last partial row block is misplaced"),
)
