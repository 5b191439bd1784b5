"""Mutants that drop, misplace or misread an argument of the call. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.visibility import Visibility
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention

Shape = tuple[int, int, int, int]


class FalsyScaleIsTheDefault(TextbookAttention):
    """scale or Dk^-0.5: 0 is taken for "not given"."""

    def scale(self, call: Call) -> float:
        return float(call.scale or self.key_dim**-0.5)


class ScaleOnTopOfTheDefault(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5 * (1.0 if call.scale is None else call.scale))


class TellsAnotherScale(TextbookAttention):
    """default_scale() says 1, and 1 / sqrt(d) is used."""

    def default_scale(self) -> float:
        return 1.0


class BiasIsScaled(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        return plain if call.bias is None else plain + call.bias.to(s.dtype) * (scale - 1)


class BiasIsTransposed(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        if call.bias is None or call.bias.shape[2] != call.bias.shape[3]:
            return plain
        bias = call.bias.to(s.dtype)
        return plain - bias + bias.transpose(-1, -2)


class BiasOfTheFirstHead(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        return plain if call.bias is None else plain + (call.bias[:, :1] - call.bias).to(s.dtype)


class BiasReplacesTheMask(TextbookAttention):
    """A bias goes where the mask went, as into one attn_mask argument."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.bias is not None and call.visibility is not None and call.visibility.only_causal:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class NegativeInfinityInTheBiasStays(TextbookAttention):
    """-inf is clamped to a large number, which hides nothing where a row has nothing else."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        return super().adjusted(s, call, scale).clamp(min=-1e30)


class CapsAfterHiding(TextbookAttention):
    """softcap * tanh(-inf) is -softcap: hidden pairs come back."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.cap is None:
            return super().normalised(s, visible, sinks)
        hidden = torch.full_like(s, -self.cap)
        return super().normalised(torch.where(visible, s, hidden), torch.ones_like(visible), sinks)

    def capped(self, s: Tensor, call: Call) -> Tensor:
        self.cap = call.softcap
        return super().capped(s, call)


class CapsWithoutTheOuterFactor(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s if call.softcap is None else torch.tanh(s / call.softcap)


class ScoreModAfterTheBias(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        s = self.capped(s, call)
        return self.modified(s if call.bias is None else s + call.bias.to(s.dtype), call)


class ScoreModGetsIndices(TextbookAttention):
    """The row's index where its position is meant: offsets are lost."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None:
            return s
        plain = Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        return call.score_mod(s, *plain.indices(0, s.shape[2], 0, s.shape[3])).to(s.dtype)


class ScoreModGetsTheKeyHead(TextbookAttention):
    """h is the key/value head of the group."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None:
            return s
        seen = call.visibility or Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        b, h, q, k = seen.indices(0, s.shape[2], 0, s.shape[3])
        return call.score_mod(s, b, h // (self.num_heads // self.num_kv_heads), q, k).to(s.dtype)


class ScoreModSeesScoresBeforeScale(TextbookAttention):
    def modified(self, s: Tensor, call: Call) -> Tensor:
        scale = self.scale(call)
        if call.score_mod is None or call.softcap is not None or not scale:
            return super().modified(s, call)
        return super().modified(s / scale, call) * scale


class MaskModOfTheFirstItem(TextbookAttention):
    """Built once for b = 0 and h = 0 and broadcast."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.visibility is None or call.visibility.mask_mod is None:
            return visible
        return visible[:1, :1].expand(shape)


class SinksCarryTheMean(TextbookAttention):
    """The sink's weight goes to the mean of all values instead of to nothing."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        rest = (1 - weights.sum(-1, keepdim=True)) * visible.any(-1, keepdim=True)
        return super().mixed(weights, v, visible) + rest * v.mean(-2, keepdim=True) * self.sinking

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.sinking = float(call.sinks is not None and not call.dropout_p)
        return super().attend(query, key, value, call)


class SinksOfTheKeyHeads(TextbookAttention):
    """Sinks are read as [Hkv] and repeated for each group."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            sinks = sinks[: self.num_kv_heads].repeat_interleave(self.num_heads // self.num_kv_heads)
        return super().normalised(s, visible, sinks)


class SinksAreScaled(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.sinks is not None:
            call.sinks = call.sinks * self.scale(call)
        return super().attend(query, key, value, call)


class SinksKeepDeadRowsAlive(TextbookAttention):
    """lse of a row that sees nothing is its sink."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if sinks is None:
            return weights, lse
        return weights, torch.where(lse == -torch.inf, sinks[:, None].to(lse.dtype), lse)


class WindowOfZeroIsNoWindow(TextbookAttention):
    """`if left:` takes 0, itself only, for unbounded."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        seen = call.visibility
        if seen is None or seen.left != 0:
            return visible
        seen.left = None
        try:
            return super().visible(call, shape, device)
        finally:
            seen.left = 0


class WindowCountsFromTheIndex(TextbookAttention):
    """Offsets move causal, not the window."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        if seen is None or seen.left is None or not isinstance(seen.offset, int):
            return visible
        index = torch.arange(shape[2], device=device)[:, None] - torch.arange(shape[3], device=device)
        return visible & (index <= seen.left)


class WindowIsSymmetric(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or seen.left is None or seen.right is None or seen.right >= seen.left:
            return super().visible(call, shape, device)
        right, seen.right = seen.right, seen.left if seen.right else 0
        try:
            return super().visible(call, shape, device)
        finally:
            seen.right = right


class OneOffsetForTheBatch(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        alike = seen is not None and isinstance(seen.offset, Tensor) and seen.query_segments is None
        return visible[:1].expand(shape) if alike and seen is not None and seen.key_present is None else visible


class NegativeOffsetIsClipped(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or not isinstance(seen.offset, int) or seen.offset >= 0:
            return super().visible(call, shape, device)
        clipped = Visibility(seen.batch, seen.num_heads, seen.query_length, seen.key_length, device)
        clipped.left, clipped.right, clipped.offset = seen.left, seen.right, 0
        return clipped.dense().expand(shape)


class PositionsRunOnInSegments(TextbookAttention):
    """Positions count through the row: alignment inside later segments is lost."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        seen = call.visibility
        if call.score_mod is None or seen is None or seen.query_segments is None:
            return super().modified(s, call)
        plain = Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        return call.score_mod(s, *plain.indices(0, s.shape[2], 0, s.shape[3])).to(s.dtype)


class MaskOfTheFirstHead(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        return super().visible(call, shape, device)[:, :1].expand(shape)


class MaskOrPadding(TextbookAttention):
    """A mask and a key mask combine with OR."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        if seen is None or seen.allowed is None or seen.key_present is None or seen.positional:
            return visible
        return seen.allowed.expand(shape) | (visible.any(-1, keepdim=True) & seen.key_present[:, None, None, :])


class MasksByMultiplication(TextbookAttention):
    """score * mask: hidden pairs score 0 and take weight."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        sees = visible.any(-1, keepdim=True)
        return super().normalised(torch.where(visible, s, 0), visible | sees, sinks)


class MasksAfterTheSoftmax(TextbookAttention):
    """Hidden weights are zeroed after the normaliser has summed them."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, torch.ones_like(visible), sinks)
        return weights * visible, torch.where(visible.any(-1), lse, -torch.inf)


MUTANTS = (
    Mutant(FalsyScaleIsTheDefault, "agrees_at_the_ends_of_arguments", "scale=0 falls back to the default"),
    Mutant(ScaleOnTopOfTheDefault, "agrees_with_definition", "scale= multiplies the default"),
    Mutant(BiasIsScaled, "agrees_with_definition", "bias before scale"),
    Mutant(BiasIsTransposed, "agrees_with_definition", "bias[k, q]"),
    Mutant(BiasOfTheFirstHead, "agrees_with_definition", "one head's bias for all"),
    Mutant(BiasReplacesTheMask, "agrees_with_definition", "causal is lost where a bias is given"),
    Mutant(NegativeInfinityInTheBiasStays, "dead_rows_are_zero", "-inf in a bias becomes a large number"),
    Mutant(CapsAfterHiding, "agrees_with_definition", "tanh of -inf"),
    Mutant(CapsWithoutTheOuterFactor, "agrees_with_definition", "tanh(s / c) without c"),
    Mutant(ScoreModAfterTheBias, "agrees_with_definition", "score_mod sees the bias"),
    Mutant(ScoreModGetsIndices, "agrees_with_definition", "indices where positions are meant"),
    Mutant(ScoreModGetsTheKeyHead, "agrees_with_definition", "h is the key head"),
    Mutant(ScoreModSeesScoresBeforeScale, "agrees_with_definition", "score_mod before scale"),
    Mutant(MaskModOfTheFirstItem, "agrees_with_definition", "mask_mod is evaluated for b = h = 0"),
    Mutant(SinksCarryTheMean, "agrees_with_definition", "the sink's weight goes to a value"),
    Mutant(SinksOfTheKeyHeads, "agrees_with_definition", "sinks per key head"),
    Mutant(SinksAreScaled, "agrees_with_definition", "sinks are scaled like scores"),
    Mutant(SinksKeepDeadRowsAlive, "dead_rows_are_zero", "lse of a dead row with a sink"),
    Mutant(WindowOfZeroIsNoWindow, "agrees_at_the_ends_of_arguments", "`if left:`"),
    Mutant(WindowCountsFromTheIndex, "agrees_with_definition", "the window ignores the offset"),
    Mutant(WindowIsSymmetric, "agrees_with_definition", "left serves both sides"),
    Mutant(OneOffsetForTheBatch, "batch_items_are_independent", "the first item's offset for all"),
    Mutant(NegativeOffsetIsClipped, "agrees_with_definition", "a negative offset becomes 0"),
    Mutant(PositionsRunOnInSegments, "agrees_with_definition", "positions do not restart"),
    Mutant(MaskOfTheFirstHead, "agrees_with_definition", "one head's mask for all"),
    Mutant(MaskOrPadding, "agrees_with_definition", "mask OR padding"),
    Mutant(MasksByMultiplication, "hidden_pairs_have_no_influence", "score * mask"),
    Mutant(MasksAfterTheSoftmax, "equal_values_come_through", "weights are masked and not normalised again"),
    Mutant(TellsAnotherScale, "the_default_scale_is_the_one_in_use", "default_scale() is not what is used"),
)
