"""Mutants that show only at certain sizes, contents or combinations. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.visibility import Visibility
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._tiled import TextbookTiled

Shape = tuple[int, int, int, int]


class OneQuerySeesEverything(TextbookAttention):
    """A decoding shortcut: one query needs no mask."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if shape[2] == 1 and call.state is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class OneKeyIsCopied(TextbookAttention):
    """One key: its weight is 1, hidden or not, sink or not."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return (torch.ones_like(weights), lse) if s.shape[-1] == 1 else (weights, lse)


class OneItemNeedsNoPadding(TextbookAttention):
    """With one item there is nothing to pad, so key_mask is not looked at."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or shape[0] != 1 or seen.pairwise or call.state is not None:
            return super().visible(call, shape, device)
        return torch.ones(shape, dtype=torch.bool, device=device)


class OneHeadIsSqueezed(TextbookAttention):
    """squeeze() takes every axis of size 1: with one item and one head the rows become items."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        if s.shape[0] == s.shape[1] == 1 and s.shape[2] == s.shape[3]:
            return s.squeeze().t().expand(s.shape)
        return s


class OddHeadIsACopy(TextbookAttention):
    """Heads are taken in pairs; the last of an odd number is that of its neighbour."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        if s.shape[1] % 2 == 0 or s.shape[1] < 3:
            return s
        return torch.cat([s[:, :-1], s[:, -2:-1]], 1)


class LongMemoryIsCut(TextbookAttention):
    """Past 512 keys the oldest are forgotten."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        return visible & (torch.arange(shape[3], device=device) >= shape[3] - 512)


class FarMemoryIsCut(TextbookAttention):
    """Past 4096 keys the oldest are forgotten."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        return visible & (torch.arange(shape[3], device=device) >= shape[3] - 4096)


class SegmentsAreRuns(TextbookAttention):
    """Ids are turned into borders where they change: segments whose tokens take turns fall apart."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        if seen is None or seen.query_segments is None or shape[2] != shape[3] or call.state is not None:
            return visible
        assert seen.key_segments is not None
        q, k = ((ids != ids.roll(1, 1)).cumsum(1) for ids in (seen.query_segments, seen.key_segments))
        return visible & (q[:, None, :, None] == k[:, None, None, :])


class LocalPastALength(TextbookAttention):
    """Long square inputs take a local approximation, under a claim of exactness."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if min(shape[2:]) <= 1024:
            return visible
        apart = torch.arange(shape[2], device=device)[:, None] - torch.arange(shape[3], device=device)
        return visible & (apart.abs() <= 512)


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


class ClipsValues(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v.clamp(-1000, 1000), visible)


class FlushesSmallScores(TextbookAttention):
    """Scores below 1e-3 in magnitude are taken for noise."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return torch.where(s.abs() < 1e-3, torch.full_like(s, -1.0) * (s != s.detach() * 0), s)


class EmptyRowsByTheirSum(TextbookAttention):
    """A row whose scores sum to 0 is taken for a row that sees nothing."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return weights * (s.sum(-1, keepdim=True) != 0), lse


class TiesGoToTheFirst(TextbookAttention):
    """Where all visible scores are equal, argmax is taken for softmax."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        top = s.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        low = s.masked_fill(~visible, torch.inf).amin(-1, keepdim=True)
        tied = (top == low) & (visible.sum(-1, keepdim=True) > 1) & (sinks is None)
        first = torch.zeros_like(weights).scatter(-1, weights.argmax(-1, keepdim=True), 1.0)
        return torch.where(tied, first, weights), lse


class SoftcapAndSinksTogether(TextbookAttention):
    """With softcap the sinks are capped too."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.softcap is not None and call.sinks is not None:
            call.sinks = call.softcap * torch.tanh(call.sinks / call.softcap)
        return super().attend(query, key, value, call)


class GroupedHeadsLoseTheirBias(TextbookAttention):
    """A bias per query head is read per key head where heads are grouped."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        if call.bias is None or call.bias.shape[1] == 1 or self.num_heads == self.num_kv_heads:
            return plain
        group = self.num_heads // self.num_kv_heads
        index = torch.arange(self.num_heads, device=s.device) // group
        return plain + (call.bias[:, index] - call.bias).to(s.dtype)


class WindowForgetsThePadding(TextbookAttention):
    """A window's own mask replaces the key mask."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        if seen is None or seen.left is None or seen.key_present is None or call.state is not None:
            return visible
        plain = Visibility(seen.batch, seen.num_heads, seen.query_length, seen.key_length, device)
        plain.left, plain.right, plain.offset = seen.left, seen.right, seen.offset
        return plain.dense().expand(shape) & visible.any(-1, keepdim=True)


class SegmentsForgetCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or seen.query_segments is None or seen.right != 0 or call.state is not None:
            return super().visible(call, shape, device)
        seen.right = None
        try:
            return super().visible(call, shape, device)
        finally:
            seen.right = 0


class RecordingTakesAnotherWindow(TextbookTiled):
    """The path that autograd records is off by one at the window's left end, forward and backward alike."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        seen = call.visibility
        if not call.recording or seen is None or not seen.left:
            return super().attend(query, key, value, call)
        seen.left -= 1
        return super().attend(query, key, value, call)


class InferenceSkipsThePadding(TextbookLinear):
    """Without gradients absent keys are left in."""

    def _features(self, key: Tensor, value: Tensor, seen: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or seen.key_present is None:
            return super()._features(key, value, seen, start, stop)
        present, seen.key_present = seen.key_present, None
        try:
            return super()._features(key, value, seen, start, stop)
        finally:
            seen.key_present = present


MUTANTS = (
    Mutant(OneQuerySeesEverything, "agrees_with_definition", "a decoding shortcut without masks"),
    Mutant(OneKeyIsCopied, "any_size_agrees_with_definition", "one key is copied, visible or not"),
    Mutant(OneItemNeedsNoPadding, "batch_items_are_independent", "key_mask is ignored for one item"),
    Mutant(OneHeadIsSqueezed, "any_size_agrees_with_definition", "squeeze() takes one axis too many"),
    Mutant(OddHeadIsACopy, "heads_are_independent", "heads in pairs"),
    Mutant(LongMemoryIsCut, "agrees_with_definition", "keys before the last 512 are forgotten"),
    Mutant(LocalPastALength, "long_inputs_agree_by_rows", "an approximation past 1024 tokens"),
    Mutant(ScaledByThePaddedWidth, "any_size_agrees_with_definition", "scale from the padded width"),
    Mutant(ValuesAreAsWideAsKeys, "any_size_agrees_with_definition", "d_v > d_k is cut"),
    Mutant(ClipsValues, "agrees_on_special_contents", "values are clipped"),
    Mutant(FlushesSmallScores, "agrees_on_special_contents", "small scores are flushed"),
    Mutant(EmptyRowsByTheirSum, "agrees_on_special_contents", "scores that sum to 0"),
    Mutant(TiesGoToTheFirst, "agrees_on_special_contents", "argmax of equal scores"),
    Mutant(SoftcapAndSinksTogether, "agrees_with_definition", "sinks are capped where scores are"),
    Mutant(GroupedHeadsLoseTheirBias, "agrees_with_definition", "a bias per key head"),
    Mutant(WindowForgetsThePadding, "agrees_with_definition", "window and key_mask together"),
    Mutant(SegmentsForgetCausal, "agrees_with_definition", "segments and causal together"),
    Mutant(RecordingTakesAnotherWindow, "gradients_match_definition", "another path while autograd records"),
    Mutant(InferenceSkipsThePadding, "modes_agree", "another path without gradients"),
    Mutant(FarMemoryIsCut, "agrees_with_definition", "keys before the last 4096 are forgotten"),
    Mutant(SegmentsAreRuns, "agrees_at_the_ends_of_arguments", "segments are taken for runs"),
)
