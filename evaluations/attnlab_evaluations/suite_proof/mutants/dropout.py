"""Mutants that the checks in `checks/dropout.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Backward

Row = tuple[Tensor, Tensor, Tensor]


class DropoutFollowsTheMode(TextbookAttention):
    """Dropout in train mode only, although dropout_p was given."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return torch.dropout(weights, p, self.training)


class DropoutIsNotRescaled(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, p) * (1 - p)


class DropoutIsNotSeeded(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        generator = torch.Generator()
        generator.seed()
        kept = torch.rand(weights.shape, generator=generator).to(weights.device) >= p
        return weights * kept / (1 - p)


class DropsNothingWhileDecoding(TextbookAttention):
    """dropout_p is ignored where a state is given."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.state is not None:
            call.dropout_p = 0.0
        return super().attend(query, key, value, call)


class StepsDropNewKeysOnly(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.past = 0 if call.state is None else call.state.length
        return super().attend(query, key, value, call)

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        used = super().dropped(weights, p)
        return torch.cat([weights[..., : self.past], used[..., self.past :]], -1)


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


class SeedsBeforeItDraws(TextbookAttention):
    """A fixed seed "for reproducibility"."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if p:
            torch.manual_seed(0)
        return super().dropped(weights, p)


class DropsOnlyWhileRecording(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, p) if torch.is_grad_enabled() else weights


class _MixedWithAnotherMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(weights, value)
        return torch.dropout(weights, p, True) @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.saved_tensors
        kept = torch.dropout(torch.ones_like(weights), ctx.p, True)  # recomputed without the forward's generator state
        return grad @ value.transpose(-1, -2) * kept, (weights * kept).transpose(-1, -2) @ grad, None


class DropoutIsDrawnAgainBackward(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        self.p = p
        return weights

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if not self.p:
            return weights @ v
        result: Tensor = _MixedWithAnotherMask.apply(weights, v, self.p)  # type: ignore[no-untyped-call]
        return result


class DropoutIsRedrawnBackward(_Backward):
    def backward_tile(self, call: Call, visibility: Visibility, t: Tile, saved: Saved, *rest: Any) -> None:
        super().backward_tile(call, visibility, t, saved._replace(seed=saved.seed + 1), *rest)


class DropoutForgetsItsFactorBackward(_Backward):
    """dp lacks the 1 / (1 - p) of kept weights; dv has it."""

    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        value = into.value.clone()
        super().backward_tile(call, visibility, t, saved, d_out, delta, into)
        if call.dropout_p:
            right = into.value.clone()
            super().backward_tile(call, visibility, t, saved, -call.dropout_p * d_out, -call.dropout_p * delta, into)
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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(DropoutFollowsTheMode, "dropout_is_seeded", "dropout_p is ignored in eval mode"),
    Mutant(DropoutIsNotRescaled, "dropout_rate", "kept weights are not divided by 1 - p"),
    Mutant(DropoutIsNotSeeded, "dropout_is_seeded", "a generator of its own"),
    Mutant(DropsNothingWhileDecoding, "dropout_rate_with_a_state", "dropout_p is ignored beside a state"),
    Mutant(StepsDropNewKeysOnly, "dropout_rate_with_a_state", "past keys are never dropped"),
    Mutant(DropsScores, "dropout_rate", "dropout before the softmax"),
    Mutant(DropsTheOutput, "dropout_rate", "dropout of the output"),
    Mutant(NormalisesAfterDropping, "dropout_rate", "kept weights sum to 1 again"),
    Mutant(KeepsThatShare, "dropout_rate", "p and 1 - p are swapped"),
    Mutant(DropsTwice, "dropout_rate", "dropout is applied in two places"),
    Mutant(SeedsBeforeItDraws, "dropout_is_seeded", "a fixed seed in the forward"),
    Mutant(DropsOnlyWhileRecording, "dropout_is_seeded", "dropout_p is ignored without gradients"),
    Mutant(DropoutIsDrawnAgainBackward, "dropout_backward_uses_the_forward_mask", "recomputation draws a new mask"),
    Mutant(DropoutIsRedrawnBackward, "dropout_gradients_match_finite_differences", "another mask backward"),
    Mutant(DropoutForgetsItsFactorBackward, "dropout_gradients_match_finite_differences", "dP without 1 / (1 - p)"),
    Mutant(OneDropoutMaskForAllHeads, "dropout_masks_are_independent", "a mask [B, 1, Lq, Lk]"),
    Mutant(OneMaskForAllQueries, "dropout_masks_are_independent", "a mask [B, H, 1, Lk]"),
    Mutant(OneMaskForAllItems, "dropout_masks_are_independent", "a mask [1, H, Lq, Lk]"),
    Mutant(OneMaskForAGroup, "dropout_masks_are_independent", "a mask [B, Hkv, Lq, Lk]"),
    Mutant(MaskRepeatsAfter32, "dropout_masks_are_independent", "a block of random numbers is reused"),
    Mutant(DroppingEverythingIsNaN, "dropout_of_one_gives_zero", "0 / 0 at p = 1"),
    Mutant(DropoutInTheNormaliser, "dropout_leaves_weights_and_lse_alone", "the normaliser sums what was kept"),
    Mutant(OneSeedForAllTiles, "dropout_masks_are_independent", "every tile draws one mask"),
    Mutant(OneSeedForTilesOfASum, "dropout_masks_are_independent", "seed + q0 + k0"),
)
