"""Mutants of `checks/dropout.py`: dropout that is unseeded, biased, or applied to the wrong tensor. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


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


MUTANTS = (
    Mutant(DropoutFollowsTheMode, "dropout_is_seeded", "dropout_p is ignored in eval mode"),
    Mutant(DropoutIsNotRescaled, "dropout_drops_that_share", "kept weights are not divided by 1 - p"),
    Mutant(DropoutIsNotSeeded, "dropout_is_seeded", "a generator of its own"),
    Mutant(DropsNothingWhileDecoding, "dropout_reaches_past_and_new_keys", "dropout_p is ignored beside a state"),
    Mutant(StepsDropNewKeysOnly, "dropout_reaches_past_and_new_keys", "past keys are never dropped"),
    Mutant(DropsScores, "dropout_drops_that_share", "dropout before the softmax"),
    Mutant(DropsTheOutput, "dropout_drops_that_share", "dropout of the output"),
    Mutant(NormalisesAfterDropping, "dropout_drops_that_share", "kept weights sum to 1 again"),
    Mutant(KeepsThatShare, "dropout_drops_that_share", "p and 1 - p are swapped"),
    Mutant(DropsTwice, "dropout_drops_that_share", "dropout is applied in two places"),
    Mutant(SeedsBeforeItDraws, "dropout_is_seeded", "a fixed seed in the forward"),
    Mutant(DropsOnlyWhileRecording, "dropout_is_seeded", "dropout_p is ignored without gradients"),
    Mutant(DropoutIsDrawnAgainBackward, "dropout_backward_uses_the_forward_mask", "recomputation draws a new mask"),
)
