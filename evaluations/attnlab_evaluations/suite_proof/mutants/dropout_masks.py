"""Mutants of `checks/dropout_masks.py`: dropout masks that repeat, or that backward draws again. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import Call, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Backward

Row = tuple[Tensor, Tensor, Tensor]


class DropoutIsRedrawnBackward(_Backward):
    def backward_tile(self, call: Call, seen: Visibility, t: Tile, saved: Saved, *rest: Any) -> None:
        super().backward_tile(call, seen, t, saved._replace(seed=saved.seed + 1), *rest)


class DropoutForgetsItsFactorBackward(_Backward):
    """dp lacks the 1 / (1 - p) of kept weights; dv has it."""

    def backward_tile(
        self, call: Call, seen: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        value = into.value.clone()
        super().backward_tile(call, seen, t, saved, d_out, delta, into)
        if call.dropout_p:
            right = into.value.clone()
            super().backward_tile(call, seen, t, saved, -call.dropout_p * d_out, -call.dropout_p * delta, into)
            into.value.copy_(right if value is not None else value)


class OneDropoutMaskForAllHeads(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return weights * torch.dropout(torch.ones_like(weights[:, :1]), p, True) if p else weights


def _mask_of(weights: Tensor, p: float, *shape: int) -> Tensor:
    return torch.dropout(weights.new_ones(shape), p, True)


class OneMaskForAllQueries(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return weights * _mask_of(weights, p, *weights.shape[:2], 1, weights.shape[3]) if p else weights


class OneMaskForAllItems(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return weights * _mask_of(weights, p, 1, *weights.shape[1:]) if p else weights


class OneMaskForAGroup(TextbookAttention):
    """Query heads of one key head share a mask."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        mask = _mask_of(weights, p, weights.shape[0], self.num_kv_heads, *weights.shape[2:])
        return weights * self.grouped(mask)


class MaskRepeatsAfter32(TextbookAttention):
    """A generator's block of 32 rows and columns is used over and over."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        block = _mask_of(weights, p, *weights.shape[:2], 32, 32)
        rows, columns = (torch.arange(n, device=weights.device) % 32 for n in weights.shape[2:])
        return weights * block[:, :, rows][..., columns]


class DroppingEverythingIsNaN(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        return weights * (torch.rand_like(weights) >= p) / torch.tensor(1 - p, device=weights.device)


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


MUTANTS = (
    Mutant(DropoutIsRedrawnBackward, "dropout_gradients_match_finite_differences", "another mask backward"),
    Mutant(DropoutForgetsItsFactorBackward, "dropout_gradients_match_finite_differences", "dP without 1 / (1 - p)"),
    Mutant(OneDropoutMaskForAllHeads, "dropout_masks_are_independent", "a mask [B, 1, Lq, Lk]"),
    Mutant(OneMaskForAllQueries, "dropout_masks_are_independent", "a mask [B, H, 1, Lk]"),
    Mutant(OneMaskForAllItems, "dropout_masks_are_independent", "a mask [1, H, Lq, Lk]"),
    Mutant(OneMaskForAGroup, "dropout_masks_are_independent", "a mask [B, Hkv, Lq, Lk]"),
    Mutant(MaskRepeatsAfter32, "dropout_masks_are_independent", "a block of random numbers is reused"),
    Mutant(DroppingEverythingIsNaN, "dropping_everything_gives_zero", "0 / 0 at p = 1"),
    Mutant(DropoutInTheNormaliser, "dropout_leaves_weights_and_lse_alone", "the normaliser sums what was kept"),
    Mutant(OneSeedForAllTiles, "dropout_masks_are_independent", "every tile draws one mask"),
    Mutant(OneSeedForTilesOfASum, "dropout_masks_are_independent", "seed + q0 + k0"),
)
