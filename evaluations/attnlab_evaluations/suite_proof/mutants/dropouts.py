"""Mutants of dropout. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


def _mask_of(weights: Tensor, p: float, *shape: int) -> Tensor:
    return torch.dropout(weights.new_ones(shape), p, True)


class DropsScores(TextbookAttention):
    """Dropout before the softmax: dropped scores are 0, and rows still sum to 1."""

    p = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.p = call.dropout_p
        return super().attend(query, key, value, call)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(torch.dropout(s, self.p, True) if self.p else s, visible, sinks)

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return weights


class DropsTheOutput(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        self.p = p
        return weights

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        return torch.dropout(out, self.p, True) if self.p else out


class NormalisesAfterDropping(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        kept = super().dropped(weights, p)
        total = kept.sum(-1, keepdim=True)
        return kept / torch.where(total == 0, 1, total)


class KeepsThatShare(TextbookAttention):
    """dropout_p is taken for the probability to keep."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, 1 - p) if p else weights


class DropsTwice(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(super().dropped(weights, p), p)


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


class SeedsBeforeItDraws(TextbookAttention):
    """A fixed seed "for reproducibility"."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if p:
            torch.manual_seed(0)
        return super().dropped(weights, p)


class DropsOnlyWhileRecording(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, p) if torch.is_grad_enabled() else weights


MUTANTS = (
    Mutant(DropsScores, "dropout_drops_that_share", "dropout before the softmax"),
    Mutant(DropsTheOutput, "dropout_drops_that_share", "dropout of the output"),
    Mutant(NormalisesAfterDropping, "dropout_drops_that_share", "kept weights sum to 1 again"),
    Mutant(KeepsThatShare, "dropout_drops_that_share", "p and 1 - p are swapped"),
    Mutant(DropsTwice, "dropout_drops_that_share", "dropout is applied in two places"),
    Mutant(OneMaskForAllQueries, "dropout_masks_are_independent", "a mask [B, H, 1, Lk]"),
    Mutant(OneMaskForAllItems, "dropout_masks_are_independent", "a mask [1, H, Lq, Lk]"),
    Mutant(OneMaskForAGroup, "dropout_masks_are_independent", "a mask [B, Hkv, Lq, Lk]"),
    Mutant(MaskRepeatsAfter32, "dropout_masks_are_independent", "a block of random numbers is reused"),
    Mutant(DroppingEverythingIsNaN, "dropping_everything_gives_zero", "0 / 0 at p = 1"),
    Mutant(SeedsBeforeItDraws, "dropout_is_seeded", "a fixed seed in the forward"),
    Mutant(DropsOnlyWhileRecording, "dropout_is_seeded", "dropout_p is ignored without gradients"),
)
