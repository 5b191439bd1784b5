"""Mutants that the checks in `checks/definition.py` must fail. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab import AttentionOutput, Call, Reason, UnsupportedRequest, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_scores import (
    SCORE,
    TextbookAdditive,
    TextbookAlibi,
    TextbookConcat,
    TextbookCosine,
    TextbookDistance,
    TextbookDot,
    TextbookLocal,
    TextbookLocation,
    TextbookLuong,
    TextbookRelative,
    TextbookRotary,
    wide,
)
from attnlab_evaluations.suite_proof.correct.textbook_sums import (
    TextbookChunked,
    TextbookChunkedDelta,
    TextbookCosformer,
    TextbookGatedDelta,
    TextbookMaps,
)
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _Exp, _length, _outer, _Relu
from attnlab_evaluations.suite_proof.mutants.weights import SubtractsTheTilesMaximum

Role = Literal["query", "key"]
Row = tuple[Tensor, Tensor, Tensor]
Gates = Mapping[str, Tensor]
TILE = 64
Shape = tuple[int, int, int, int]


class FalsyScaleIsTheDefault(TextbookAttention):
    """scale or Dk^-0.5: 0 is taken for "not given"."""

    def scale(self, call: Call) -> float:
        return float(call.scale or self.key_dim**-0.5)


class WindowOfZeroIsNoWindow(TextbookAttention):
    """`if left:` takes 0, itself only, for unbounded."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        visibility = call.visibility
        if visibility is None or visibility.left != 0:
            return visible
        visibility.left = None
        try:
            return super().visible(call, shape, device)
        finally:
            visibility.left = 0


class SubtractsTheTilesMaximumWithoutLse(SubtractsTheTilesMaximum):
    """One tile holds all of a small call; only past the tile does it show."""

    capabilities = replace(SCORE, lse=False, sinks=False, softcap=False, score_mod=False, bias=False)


class TakesZeroScoresForHidden(TextbookDot):
    """masked_fill(s == 0, -inf), as after a multiplication by a mask."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.masked_fill(s == 0, -torch.inf)


class TakesZeroKeysForPadding(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.masked_fill((key == 0).all(-1)[:, :, None], -torch.inf)


class NormsAreBoundedBelow(TextbookCosine):
    def normed(self, x: Tensor) -> Tensor:
        return x / (_length(x) + 1e-5)


class ExpandedSquare(TextbookDistance):
    """-(q^2 - 2 q k + k^2): far from the origin the terms cancel."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        q, k = wide(query), wide(key)
        squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
        return 2 * q @ k.transpose(-1, -2) - squares


class LargeWindowsAreRounded(TextbookTiled):
    """A window wider than a tile is rounded up to whole tiles."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if visibility is not None and visibility.left is not None and visibility.left > self.side:
            visibility.left = -(-visibility.left // self.side) * self.side
        return super().attend(query, key, value, call)


def _whole_tiles(tokens: int, side: int) -> int:
    return -(-tokens // side) * side


class SkipsByTheFirstItemsOffset(TextbookTiled):
    """Tiles past the first item's causal bound are skipped for all."""

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(visibility, q0, q1)
        if (
            not isinstance(visibility.offset, Tensor)
            or visibility.right is None
            or visibility.query_segments is not None
        ):
            return first, last
        return first, min(last, max(first, _whole_tiles(int(visibility.offset[0]) + q1 + visibility.right, self.side)))


class SkipsByTheFirstItemsLength(TextbookTiled):
    """Tiles past the first item's last key are skipped for all."""

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(visibility, q0, q1)
        if visibility.key_present is None or visibility.query_segments is not None:
            return first, last
        held = torch.where(visibility.key_present[0], torch.arange(1, 1 + visibility.key_length), 0).max()
        return first, min(last, max(first, _whole_tiles(int(held), self.side)))


class RightWindowAloneIsCausal(TextbookAttention):
    """Without a left bound a right one is read as 0."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is None or visibility.left is not None or visibility.right is None or call.state is not None:
            return super().visible(call, shape, device)
        right, visibility.right = visibility.right, min(visibility.right, 0)
        visible = super().visible(call, shape, device)
        visibility.right = right
        return visible


class ClampsWhatAScoreModHides(TextbookAttention):
    """-inf from a score_mod becomes -1e4."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        result = super().modified(s, call)
        return result if call.score_mod is None else result.clamp(min=-1e4)


class ReshapesWhatAScoreModReturns(TextbookAttention):
    """What a score_mod returns is taken to be as large as the scores."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        return super().modified(s, call).reshape(s.shape)


class ClampsValuesLikeHalf(TextbookAttention):
    """A remedy for float16's range that acts on every dtype."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v.clamp(-65504, 65504), visible)


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


class WindowStartsAtATile(TextbookTiled):
    """The first tile of a window is rounded up to the next tile border."""

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(visibility, q0, q1)
        return -(-first // self.side) * self.side, last


class EmptyTilesAreNaN(TextbookTiled):
    """exp(-inf - -inf) in a tile that hides all, before the first that does not."""

    def joined(self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, s, v, call, seed, t)
        spoiled = torch.where(higher > -torch.inf, 0.0, float("nan")) * bool(t.k0 or t.q0)
        return higher, new_z + spoiled, new_n + spoiled


class CancellingElu(TextbookMaps):
    """(exp(x) - 1) + 1 far below 0 is 0 in float32."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.where(x > 0, x, (x.clamp(max=0).exp() * 2**10).round() / 2**10 - 1) + 1


class EpsilonBesideTinySums(_Relu):
    """1e-6 in the normaliser, which tiny features do not reach."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if call.state is not None or call.visibility is not None or call.need_weights:
            return answer
        group = self.num_heads // self.num_kv_heads
        q, k = query.relu(), key.relu().repeat_interleave(group, 1)
        z = (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)
        return answer._replace(out=answer.out * (z / (z + 1e-6)))


class NormalisesKeysItself(TextbookDelta):
    """The paper's keys have unit length: here they are made so, which the formula does not say."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, torch.nn.functional.normalize(key, dim=-1), value, gates)


class ClampsItsMemory(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, gates).clamp(-2.0, 2.0)


class DecayIsBounded(TextbookGatedDelta):
    """g below -5 is cut off."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {**gates, "log_decay": gates["log_decay"].clamp(min=-5)})


class SegmentsAreRuns(TextbookAttention):
    """Ids are turned into borders where they change: segments whose tokens take turns fall apart."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        if visibility is None or visibility.query_segments is None or shape[2] != shape[3] or call.state is not None:
            return visible
        assert visibility.key_segments is not None
        q, k = ((ids != ids.roll(1, 1)).cumsum(1) for ids in (visibility.query_segments, visibility.key_segments))
        return visible & (q[:, None, :, None] == k[:, None, None, :])


class LocalPastALength(TextbookAttention):
    """Long square inputs take a local approximation, under a claim of exactness."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if min(shape[2:]) <= 1024:
            return visible
        apart = torch.arange(shape[2], device=device)[:, None] - torch.arange(shape[3], device=device)
        return visible & (apart.abs() <= 512)


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


class DetachedKeys(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query) @ wide(key.detach()).transpose(-1, -2)


class DeltaIsMissing(_Backward):
    """ds = p * dp, as if the normaliser were a constant."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return torch.zeros_like(d_lse)


class DeltaOfOneNumber(_Backward):
    """The row's sum is taken over the first half of the width."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        half = out.shape[-1] // 2 or 1
        return (d_out * out)[..., :half].sum(-1, keepdim=True) - d_lse


class QueryGradientIsNotScaled(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        scale = self.scale(call)
        return own._replace(query=own.query / scale) if scale else own


class KeyGradientIsScaledTwice(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * self.scale(call))


class BackwardTakesTheDefaultScale(_Backward):
    """scale= arrives in forward only."""

    def inputs_of(self, call: Call, *rest: Any) -> tuple[Any, ...]:
        other = Call(**{name: getattr(call, name) for name in Call.__slots__ if name != "scale"})
        return other, *rest


class QueryAndKeyGradientsAreSwapped(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        swapped = own.query.shape == own.key.shape
        return own._replace(query=own.key, key=own.query) if swapped else own


class FirstHeadOfTheGroup(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        return gradient[:, ::group].contiguous()


class MeanOfTheGroup(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient) / (self.num_heads // self.num_kv_heads)


class GroupIsFoldedAsTiled(_Backward):
    """k0, k1, k0, k1 backward where forward has k0, k0, k1, k1."""

    def folded(self, gradient: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        batch, _, *rest = gradient.shape
        return gradient.reshape(batch, group, self.num_kv_heads, *rest).sum(1)


class BackwardForgetsTheMask(_Backward):
    """Hidden pairs take part in the recomputation: causal is a flag of the forward."""

    def inputs_of(self, call: Call, visibility: Visibility, *rest: Any) -> tuple[Any, ...]:
        open_to_all = Visibility(
            visibility.batch, visibility.num_heads, visibility.query_length, visibility.key_length, visibility.device
        )
        return call, open_to_all, *rest


class BackwardForgetsTheWindow(_Backward):
    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        if visibility.left is None or not torch.is_grad_enabled() or not self.inside:
            return super().hidden(s, visibility, t)
        left, visibility.left = visibility.left, None
        try:
            return super().hidden(s, visibility, t)
        finally:
            visibility.left = left

    inside = False

    def backward_tile(self, *args: Any) -> None:
        self.inside = True
        with torch.enable_grad():
            args[3].query.detach_()
            super().backward_tile(*args)
        self.inside = False


class BackwardOfTheFirstRowBlock(_Backward):
    """The loop over row blocks ends with the last whole one."""

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.q0 and t.q1 - t.q0 < self.side
        return Gradients(*(None if x is None else x * (not partial) for x in own))  # type: ignore[arg-type]


class BackwardSkipsTheLastKeys(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        partial = t.k0 and t.k1 - t.k0 < self.side
        return own._replace(value=own.value * (not partial))


class LastTileOverwrites(_Backward):
    """dk of a tile is stored, not added: the last row block wins."""

    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        into.key[:, :, t.k0 : t.k1] = 0
        super().backward_tile(call, visibility, t, saved, d_out, delta, into)


class BiasHasNoGradient(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(bias=None)


class BiasGradientIsAMean(_Backward):
    """Broadcast axes are averaged, not summed."""

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        if own.bias is None:
            return own
        full = torch.Size((*saved.query.shape[:3], saved.key.shape[2])).numel()
        return own._replace(bias=own.bias * (own.bias.numel() / full))


class BiasGradientIsScaled(_Backward):
    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own if own.bias is None else own._replace(bias=own.bias * self.scale(call))


class SinksHaveNoGradient(_Backward):
    def sinks_gradient(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        return torch.zeros_like(sinks)


class SinksGradientHasTheOtherSign(_Backward):
    def sinks_gradient(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        return -super().sinks_gradient(sinks, lse, delta)


class SoftcapHasNoDerivative(_Backward):
    def cap_slope(self, x: Tensor, call: Call) -> Tensor | float:
        return 1.0


class SoftcapDerivativeOfTheCapped(_Backward):
    """1 - tanh^2 of the capped score, not of the score."""

    def cap_slope(self, x: Tensor, call: Call) -> Tensor | float:
        if call.softcap is None:
            return 1.0
        return super().cap_slope(call.softcap * torch.tanh(x / call.softcap), call)


class ProbabilitiesWithoutReference(_Backward):
    """exp(s) / exp(lse): both overflow where scores are large."""

    def probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(s) / torch.exp(torch.where(lse > -torch.inf, lse, 0))


class GradientsOfTheFirstItem(_Backward):
    """The batch stride is missing: all items receive the first one's key gradient."""

    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient)[:1].expand(gradient.shape[0], -1, -1, -1).clone()


class ClipsGradients(_Backward):
    def folded(self, gradient: Tensor) -> Tensor:
        return super().folded(gradient).clamp(-0.5, 0.5)


class BackwardRoundsTheWindow(TextbookTiled):
    def backward_tile(self, call: Call, visibility: Visibility, *rest: Any) -> None:
        left = visibility.left
        if left is not None and left > self.side:
            visibility.left = -(-left // self.side) * self.side
        super().backward_tile(call, visibility, *rest)
        visibility.left = left


class BackwardOf64IgnoresScale(TextbookTiled):
    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        before = into.query.clone()
        super().backward_tile(call, visibility, t, saved, d_out, delta, into)
        if self.key_dim in (64, 128) and call.scale is not None:
            into.query.copy_(before + (into.query - before) * self.key_dim**-0.5 / call.scale)


class BackwardSkipsByTheFirstItemsLength(TextbookTiled):
    def backward_tile(self, call: Call, visibility: Visibility, t: Tile, *rest: Any) -> None:
        present = visibility.key_present
        if present is None or visibility.query_segments is not None or bool(present[0, t.k0 :].any()):
            super().backward_tile(call, visibility, t, *rest)


class RepairsWhatAScoreModHides(TextbookAttention):
    """Rows that a score_mod hides are repaired after the softmax: NaN backward."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.modifying = call.score_mod is not None and call.bias is None and call.sinks is None
        return super().attend(query, key, value, call)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if not self.modifying:
            return weights, lse
        alive = visible.any(-1, keepdim=True)
        s = torch.where(alive, s.masked_fill(~visible, -torch.inf), 0)
        return torch.where(alive, torch.softmax(s, -1).nan_to_num(0), 0), lse


class NormaliserIsDetached(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        finite = torch.where(lse == -torch.inf, 0, lse).detach().unsqueeze(-1)
        moved = torch.exp(torch.where(weights > 0, s - finite, 0))
        return torch.where(weights > 0, moved, 0), lse


class BiasGradientIsNotReduced(TextbookAttention):
    """A broadcast bias receives the gradient of its first row only."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        if call.bias is None:
            return plain
        bias = call.bias.to(s.dtype)
        first = torch.zeros_like(plain)
        first[:1] = 1
        return plain - bias * (1 - first) + bias.detach() * (1 - first)


class DetachedCarry(TextbookChunked):
    """No gradient passes a chunk's border."""

    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, total = super().carried(sums, total, k, v)
        return sums.detach(), total.detach()


class NormaliserIsAConstantBackward(TextbookChunked):
    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return super().divided(n, z.detach())


class GradientsAreSummedInHalf(TextbookTiled):
    """dK and dV are stored in the inputs' dtype after each row block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.narrow_dtype = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
        return super().attend(query, key, value, call)

    def backward_tile(self, *args: Any) -> None:
        into: Gradients = args[-1]
        saved: Saved = args[3]
        super().backward_tile(*args)
        if saved.query.dtype == torch.float32:
            into.key.copy_(into.key.to(self.narrow_dtype))


class TruncatesItsPast(TextbookDelta):
    """The recalled part is detached: backpropagation through time ends at each token."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory.detach(), key)
        return memory + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class BetaHasNoGradient(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": gates["beta"].detach()})


class RecordingTakesAnotherWindow(TextbookTiled):
    """The path that autograd records is off by one at the window's left end, forward and backward alike."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if not call.recording or visibility is None or not visibility.left:
            return super().attend(query, key, value, call)
        visibility.left -= 1
        return super().attend(query, key, value, call)


class TableOf1024Keys(_Backward):
    """dK is collected in a table of 1024 rows; what lies past it is lost."""

    side = 256

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * (t.k0 < 1024))


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


class ScaleOnTopOfTheDefault(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5 * (1.0 if call.scale is None else call.scale))


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
        visibility = call.visibility or Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        b, h, q, k = visibility.indices(0, s.shape[2], 0, s.shape[3])
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


class WindowCountsFromTheIndex(TextbookAttention):
    """Offsets move causal, not the window."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        if visibility is None or visibility.left is None or not isinstance(visibility.offset, int):
            return visible
        index = torch.arange(shape[2], device=device)[:, None] - torch.arange(shape[3], device=device)
        return visible & (index <= visibility.left)


class WindowIsSymmetric(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if (
            visibility is None
            or visibility.left is None
            or visibility.right is None
            or visibility.right >= visibility.left
        ):
            return super().visible(call, shape, device)
        right, visibility.right = visibility.right, visibility.left if visibility.right else 0
        try:
            return super().visible(call, shape, device)
        finally:
            visibility.right = right


class NegativeOffsetIsClipped(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is None or not isinstance(visibility.offset, int) or visibility.offset >= 0:
            return super().visible(call, shape, device)
        clipped = Visibility(
            visibility.batch, visibility.num_heads, visibility.query_length, visibility.key_length, device
        )
        clipped.left, clipped.right, clipped.offset = visibility.left, visibility.right, 0
        return clipped.dense().expand(shape)


class PositionsRunOnInSegments(TextbookAttention):
    """Positions count through the row: alignment inside later segments is lost."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        visibility = call.visibility
        if call.score_mod is None or visibility is None or visibility.query_segments is None:
            return super().modified(s, call)
        plain = Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        return call.score_mod(s, *plain.indices(0, s.shape[2], 0, s.shape[3])).to(s.dtype)


class MaskOfTheFirstHead(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        return super().visible(call, shape, device)[:, :1].expand(shape)


class MaskOrPadding(TextbookAttention):
    """A mask and a key mask combine with OR."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        if visibility is None or visibility.allowed is None or visibility.key_present is None or visibility.positional:
            return visible
        return visibility.allowed.expand(shape) | (
            visible.any(-1, keepdim=True) & visibility.key_present[:, None, None, :]
        )


class ScaledByTheValueWidth(TextbookDot):
    def default_scale(self) -> float:
        return float(self.value_dim**-0.5)


class ScaledInsideAndOutside(TextbookDot):
    """The score divides by sqrt(d) itself, so that a caller's scale comes on top."""

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query) @ wide(key).transpose(-1, -2) / math.sqrt(self.key_dim)


class AlwaysInBfloat16(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return (query.bfloat16() @ key.bfloat16().transpose(-1, -2)).float()


class NeverInFloat64(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return query.float() @ key.float().transpose(-1, -2)


class TransposedWhereSquare(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.transpose(-1, -2) if s.shape[-1] == s.shape[-2] else s


class RoundsScores(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s + ((s * 1024).round() / 1024 - s).detach()


class ClampsScores(TextbookDot):
    """clamp(-50, 50) "for stability"."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return (wide(query) @ wide(key).transpose(-1, -2)).clamp(-50, 50)


class KeepsTheLargest32(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        if s.shape[-1] <= 32:
            return s
        return s.masked_fill(s < s.topk(32, dim=-1).values[..., -1:], -torch.inf)


class HidesItself(TextbookDot):
    """A query may not see its own position, as in a shared query-key space."""

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        if s.shape[-1] != s.shape[-2]:
            return s
        return s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool, device=s.device), -5e4)


class HeadsAreSplitWithoutTranspose(TextbookDot):
    """view(B, L, H, D) where the memory is [B, H, L, D]."""

    def project_query(self, query: Tensor) -> Tensor:
        batch, heads, length, width = query.shape
        return query.reshape(batch, length, heads, width).transpose(1, 2)


class FusedPathForgetsTheScore(TextbookRelative):
    """`inner_product` says that the score is a plain product, which it is not."""

    inner_product = True


class CountsFromTheFirstQuery(TextbookRelative):
    """Positions are made anew from the tile: offsets, states and segments are lost."""

    def buckets(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        def own(x: Tensor) -> Tensor:
            return torch.arange(x.shape[-1], device=x.device)

        return super().buckets(own(query_positions), own(key_positions))


class LooksUpTheMirroredDistance(TextbookRelative):
    def buckets(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return 2 * self.reach - super().buckets(query_positions, key_positions)


class FarBucketsWrap(TextbookRelative):
    """Distances are clipped on one side; a negative index reads from the table's end."""

    def buckets(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        return distance.clamp(max=self.reach).add(self.reach) % (2 * self.reach + 1)


class SlopesOfThePowerOfTwo(TextbookAlibi):
    def slopes(self, device: torch.device) -> Tensor:
        count: int = 1 << (self.num_heads - 1).bit_length()
        slopes: Tensor = super().slopes(device) ** (self.num_heads / count)
        return slopes


class SlopesStartAtOne(TextbookAlibi):
    def slopes(self, device: torch.device) -> Tensor:
        first: float = 2.0 ** (8.0 / self.num_heads)
        return super().slopes(device) * first


class NeighboursArePaired(TextbookRotary):
    """Coordinates 0 and 1 turn together where 0 and D / 2 are meant."""

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[2] != positions.shape[-1] or positions.dim() != 1 or int(x.shape[-1]) % 2:
            return super().turned(x, positions)
        order = torch.cat([torch.arange(0, x.shape[-1], 2), torch.arange(1, x.shape[-1], 2)])
        return super().turned(wide(x)[..., order], positions)


class AnglesInHalfPrecision(TextbookRotary):
    """bfloat16 holds positions up to 256."""

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().turned(x, positions.bfloat16())


class KeysAreNotTurned(TextbookRotary):
    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self.turned(query, query_positions) @ wide(key).transpose(-1, -2)


class GaussianOfTheIndex(TextbookLocal):
    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        rows = torch.arange(query.shape[2], device=query.device)
        columns = torch.arange(key_positions.shape[-1], device=query.device)
        return super().reweight(query, query_positions=rows, key_positions=columns)


class NormalisesAgain(TextbookLocal):
    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        factor = super().reweight(query, query_positions=query_positions, key_positions=key_positions)
        assert factor is not None
        return factor / factor.sum(-1, keepdim=True)


class ForgetsTheVector(TextbookAdditive):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return self.hidden(query, key).sum(-1)


class OneVectorForAllHeads(TextbookAdditive):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return self.hidden(query, key) @ wide(self.v)[0]


class SigmoidForTanh(TextbookAdditive):
    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.sigmoid(wide(query)[:, :, :, None] + wide(key)[:, :, None])


class AdditiveKeepsTheRoot(TextbookAdditive):
    def default_scale(self) -> float:
        return float(self.key_dim**-0.5)


class KeysTakeTheQuerysMatrix(TextbookAdditive):
    def project_key(self, key: Tensor) -> Tensor:
        return wide(key) @ wide(self.W_q if self.W_q.shape == self.W_k.shape else self.W_k).transpose(-1, -2)


class MatrixOfTheKeyHead(TextbookLuong):
    """W_a[h // group]: the matrices of the first heads serve all."""

    def project_query(self, query: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        index = torch.arange(self.num_heads, device=query.device) // group
        return wide(query) @ wide(self.W_a)[index]


class LuongKeepsTheRoot(TextbookLuong):
    def default_scale(self) -> float:
        return float(self.key_dim**-0.5)


class KeyBeforeQuery(TextbookConcat):
    def project_query(self, query: Tensor) -> Tensor:
        return wide(query) @ wide(self.W_a)[..., -self.head_dim :].transpose(-1, -2)

    def project_key(self, key: Tensor) -> Tensor:
        return wide(key) @ wide(self.W_a)[..., : self.key_dim].transpose(-1, -2)


class ConcatWithoutTanh(TextbookConcat):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.einsum("bhqka,ha->bhqk", query[:, :, :, None] + key[:, :, None], wide(self.v_a))


class LocationCountsFromOne(TextbookLocation):
    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions + 1)


class NormedOverTheLength(TextbookCosine):
    def normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-2)


class TemperatureOfTheItem(TextbookCosine):
    """`tau[:, None, None, None]` scales batch items where there are as many as heads."""

    def project_query(self, query: Tensor) -> Tensor:
        tau = wide(self.log_tau).exp()
        by_item = query.shape[0] == self.num_heads
        return self.normed(wide(query)) * (tau[:, None, None, None] if by_item else tau[:, None, None])


class ForgetsTheKeysNorm(TextbookDistance):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return 2 * wide(query) @ wide(key).transpose(-1, -2) - wide(query).square().sum(-1)[..., None]


class CorrectsInsideChunksOnly(TextbookChunkedDelta):
    """What the memory held before the chunk is not recalled when the chunk's tokens are written."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        out, fresh = super().chunk(torch.zeros_like(memory), query, key, value, beta, decay)
        kept = decay.cumsum(-1).exp()
        if out is not None and query is not None:
            out = out + (query * kept[:, :, None, :, None]) @ memory[:, :, None]
        return out, fresh + memory * kept[..., -1:, None]


class BetaOutsideTheSystem(TextbookChunkedDelta):
    """`(1 + M) u = beta v` is solved, without the beta before M: tokens of a chunk recall each other whole."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        fading, one = decay.cumsum(-1), torch.ones_like(beta)
        held = (key * fading.exp()[..., None]) @ memory  # what the chunk's keys read of the memory before
        target = beta[..., None] * (value - held) + held
        return super().chunk(memory, query, key, target, one, decay)


class FadesByTheFirstToken(TextbookChunkedDelta):
    """Every token of a chunk fades by the gate of the chunk's first."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return super().chunk(memory, query, key, value, beta, decay[..., :1].expand_as(decay))


class RefusesInTheMiddle(TextbookAttention):
    """A combination is refused by attend, and supports() knows nothing of it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if visibility is not None and visibility.left is not None and self.num_heads != self.num_kv_heads:
            reason = Reason("window", "a window with grouped heads", "as many key/value heads")
            raise UnsupportedRequest(f"{self.name} does not support {reason}", [reason])
        return super().attend(query, key, value, call)


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


class DropsTheLastPartialTile(TextbookTiled):
    """range(0, keys // T * T, T), once there are whole tiles."""

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(visibility, q0, q1)
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

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(visibility, q0, q1)
        return (
            (first, min(last, visibility.key_range(q0, q0 + 1)[1])) if visibility.right is not None else (first, last)
        )


class HidesNothingInWholeTiles(TextbookTiled):
    """A tile below the diagonal is taken for fully visible, whatever else hides."""

    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        if (
            visibility.right == 0
            and isinstance(visibility.offset, int)
            and t.k1 - 1 <= t.q0 + visibility.offset
            and t.q0
        ):
            return s
        return super().hidden(s, visibility, t)


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

    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        if (
            visibility.allowed is None
            or t.q0 == t.k0
            or max(t.q1, t.k1) > min(visibility.query_length, visibility.key_length)
        ):
            return super().hidden(s, visibility, t)
        if t.q1 - t.q0 != t.k1 - t.k0:
            return super().hidden(s, visibility, t)
        return super().hidden(s, visibility, Tile(t.k0, t.k1, t.q0, t.q1))


class SinksJoinEveryTile(TextbookTiled):
    def forward_row(
        self, call: Call, visibility: Visibility, tiles: list[Tile], q0: int, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        sinks = None if saved.sinks is None else saved.sinks + math.log(max(len(tiles), 1))
        return super().forward_row(call, visibility, tiles, q0, saved._replace(sinks=sinks))


class RoundedLog2OfE(TextbookTiled):
    """exp2(1.4427 x): four decimals of log2(e)."""

    def products(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().products(q, k, call) * (1.4427 * math.log(2))


class EpsilonInTheNormaliser(TextbookTiled):
    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().finished(m, z + 1e-6, n, sinks)


class RowsOfTheNextTileRepeat(TextbookTiled):
    """The last row block is moved back to be whole, and its rows are written where the block would have been."""

    def forward_row(
        self, call: Call, visibility: Visibility, tiles: list[Tile], q0: int, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().forward_row(call, visibility, tiles, q0, saved)
        return (out.roll(1, 2), lse.roll(1, 2)) if q0 and out.shape[2] < self.side else (out, lse)


class ScaledByTheModelWidth(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float((self.num_heads * self.key_dim) ** -0.5) if call.scale is None else super().scale(call)


class SoftcapBeforeScale(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        if call.softcap is None:
            return s
        scale = self.scale(call)
        return call.softcap * torch.tanh(s / scale / call.softcap) * scale


class BiasBeforeSoftcap(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        biased = s if call.bias is None else s + call.bias.to(s.dtype)
        return self.modified(self.capped(biased, call), call)


class SubtractsNoMaximum(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            return super().normalised(s, visible, sinks)
        e = torch.exp(s).masked_fill(~visible, 0)
        total = e.sum(-1, keepdim=True)
        return e / torch.where(total == 0, 1, total), total.squeeze(-1).log()


class _Additive(TextbookAttention):
    formula = "additive"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        heads, width = self.num_heads, self.head_dim
        self.W_q = nn.Parameter(torch.randn(heads, width, self.head_dim) * self.head_dim**-0.5)
        self.W_k = nn.Parameter(torch.randn(heads, width, self.key_dim) * self.key_dim**-0.5)
        self.v = nn.Parameter(torch.randn(heads, width))

    def scale(self, call: Call) -> float:
        return 1.0 if call.scale is None else call.scale


class TanhBeforeTheSum(_Additive):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        a = torch.tanh(torch.einsum("had,bhid->bhia", self.W_q.to(q.dtype), q)).unsqueeze(-2)
        b = torch.tanh(torch.einsum("had,bhjd->bhja", self.W_k.to(q.dtype), k)).unsqueeze(-3)
        return torch.einsum("ha,bhija->bhij", self.v.to(q.dtype), a + b)


class SwappedProjections(_Additive):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        a = torch.einsum("had,bhid->bhia", self.W_k.to(q.dtype), q).unsqueeze(-2)
        b = torch.einsum("had,bhjd->bhja", self.W_q.to(q.dtype), k).unsqueeze(-3)
        return torch.einsum("ha,bhija->bhij", self.v.to(q.dtype), torch.tanh(a + b))


class TransposedGeneralScore(TextbookAttention):
    """k^T W_a q where q^T W_a k is meant."""

    formula = "multiplicative"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.W_a = nn.Parameter(torch.randn(self.num_heads, self.head_dim, self.key_dim) * self.key_dim**-0.5)

    def scale(self, call: Call) -> float:
        return 1.0 if call.scale is None else call.scale

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return torch.einsum("bhie,hde,bhjd->bhij", q, self.W_a.to(q.dtype), k)


class EluWithoutOne(TextbookLinear):
    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.nn.functional.elu(x)


class StabilisedPerKey(TextbookLinear):
    """exp features whose maximum is taken per key: it no longer cancels."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"feature_map": "exp"}

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.exp(x - x.amax(dim=-1, keepdim=True)) if x.shape[2] else torch.exp(x)


class WritesWithoutPrediction(TextbookDelta):
    """A plain sum beta k v^T: the error term is missing."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return memory + (key * gates["beta"].unsqueeze(-1)).unsqueeze(-1) * value.unsqueeze(-2)


class BetaScalesTheValueOnly(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        step = gates["beta"].unsqueeze(-1) * value - recalled
        return memory + key.unsqueeze(-1) * step.unsqueeze(-2)


class SquareOfTheRelusArgument(TextbookMaps):
    """elu(x) + 1 computed as exp(x) below 0 and x^2 + 1 above."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.where(x > 0, x.square() + 1, x.clamp(max=0).exp())


class ReluPlusEpsilon(_Relu):
    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return x.relu() + 1e-3


class StabilisedByTheLongestKey(_Exp):
    """One maximum over all keys, taken from what a causal query may not see, and clipped at 0 below it."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        if role == "query" or not x.shape[2]:
            return super().feature_map(x, role=role, positions=positions)
        return torch.exp((x - x.amax((-2, -1), keepdim=True)).clamp(min=-4))


class QueryMapForBoth(_Exp):
    """The query's row maximum is divided out of keys too, where it does not cancel."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return super().feature_map(x, role="query", positions=positions)


class CapsItsTable(TextbookCosformer):
    """Positions wrap at a table of 64 entries."""

    def angle(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().angle(x, positions % 64)


class TurnsByTheIndex(TextbookCosformer):
    def angle(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().angle(x, torch.arange(x.shape[2], device=x.device))


class TurnsByTheLength(TextbookCosformer):
    """The angle is scaled by the call's own length, so that a token's features depend on how many follow."""

    def angle(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().angle(x, positions) * (65536 / max(x.shape[2], 1))


class NormalisesWithAnEpsilon(TextbookChunked):
    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return n / (z + 1e-6)


class ChunksAreLateByOne(TextbookChunked):
    """The sums that a chunk reads end before the chunk before it."""

    def scanned(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.late: list[tuple[Tensor, Tensor]] = []
        return super().scanned(q, k, v)

    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.late.append(super().carried(*(self.late[-1] if self.late else (sums, total)), k, v))
        return self.late[-2] if len(self.late) > 1 else (torch.zeros_like(sums), torch.zeros_like(total))


class NormaliserStartsAnewInEachChunk(TextbookChunked):
    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().carried(sums, torch.zeros_like(total), k, v)


class ChunkForgetsItsOwnToken(TextbookChunked):
    """tril(-1) past the first chunk."""

    def inner(self, products: Tensor) -> Tensor:
        if products.shape[-1] < self.chunk or products.shape[-2] < 2:
            return products.tril()
        return products.tril(-1) + products.tril().triu() * (torch.arange(products.shape[-1]) < 1)


class LastChunkIsLost(TextbookChunked):
    """The tail is computed as if no chunk came before it."""

    def read(self, q: Tensor, sums: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        n, z = super().read(q, sums, total)
        return (n, z) if q.shape[2] == self.chunk else (0 * n, 0 * z)


class CarriesInHalfPrecision(TextbookChunked):
    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, total = super().carried(sums, total, k, v)
        return sums.bfloat16().to(sums.dtype), total


class CausalIsAlwaysTopLeft(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if (
            visibility is not None
            and isinstance(visibility.offset, int)
            and visibility.right == 0
            and call.state is None
        ):
            return torch.ones(shape, dtype=torch.bool, device=device).tril()
        return super().visible(call, shape, device)


class CausalForgetsItsOwnPosition(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.visibility is None or not call.visibility.only_causal:
            return visible
        return visible & visible.roll(-1, dims=-1)


class MaskDropsCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is not None and visibility.allowed is not None and visibility.right is not None:
            return visibility.allowed.expand(shape)
        return super().visible(call, shape, device)


class WindowIsExclusive(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        if visibility is None or visibility.left is None:
            return visible
        _, _, q, k = visibility.indices(0, shape[2], 0, shape[3])
        return visible & (k > q - visibility.left)


class KeyMaskHidesQueries(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        visibility = call.visibility
        if visibility is None or visibility.key_present is None or shape[2] != shape[3]:
            return visible
        return torch.ones_like(visible) & visibility.key_present[:, None, :, None]


class Float64IsComputedInFloat32(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if query.dtype != torch.float64 or call.state is not None:
            return super().attend(query, key, value, call)
        answer = super().attend(query.float(), key.float(), value.float(), call)
        weights, lse = (None if x is None else x.double() for x in (answer.weights, answer.lse))
        return AttentionOutput(answer.out.double(), weights, lse, answer.state)


class ErrorHasTheOtherSign(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return 2 * memory - super().update(memory, key, value, gates)


class RecallsWithoutBeta(TextbookDelta):
    """beta scales what is written twice: beta v - beta^2 recalled."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        beta = gates["beta"].unsqueeze(-1)
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        return memory + _outer(key, beta * (value - beta * recalled))


class BetaOfTheFirstHead(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": gates["beta"][:, :1].expand_as(gates["beta"])})


class BetaIsSquashedAgain(TextbookDelta):
    """A sigmoid over what is a sigmoid already."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": torch.sigmoid(gates["beta"])})


class MemoryIsTransposed(TextbookDelta):
    """S k where S^T k is meant; it shows where both widths agree, and fails where they do not."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        if key.shape[-1] != value.shape[-1]:
            return super().update(memory, key, value, gates)
        recalled = torch.einsum("bhed,bhd->bhe", memory, key)
        return memory + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class StoresInHalfPrecision(TextbookDelta):
    """Each token's memory is rounded to bfloat16."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, gates).bfloat16().to(memory.dtype)


class ReadsScaled(TextbookDelta):
    """The read divides by sqrt(d), and so does the family."""

    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, query) / math.sqrt(self.key_dim)


class ReadsNormed(TextbookDelta):
    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, torch.nn.functional.normalize(query, dim=-1))


class ReadsBeforeWriting(TextbookDelta):
    """A query reads before the token at its position is written."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if (
            visibility is None
            or visibility.right is None
            or call.state is not None
            or not isinstance(visibility.offset, int)
        ):
            return super().attend(query, key, value, call)
        visibility.offset -= 1
        try:
            return super().attend(query, key, value, call)
        finally:
            visibility.offset += 1


class DecaysAfterWriting(TextbookGatedDelta):
    """exp(g) fades what was just written as well."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        plain = super().update(memory, key, value, {**gates, "log_decay": torch.zeros_like(gates["log_decay"])})
        return plain * gates["log_decay"].exp()[..., None, None]


class RecallsFromTheUnfaded(TextbookGatedDelta):
    """The error is that of the memory before its decay."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        decay = gates["log_decay"].exp()[..., None, None]
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        return memory * decay + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class DecayIsNoLogarithm(TextbookGatedDelta):
    """1 + g for exp(g)."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        other = torch.log1p(gates["log_decay"].clamp(min=-0.99))
        return super().update(memory, key, value, {**gates, "log_decay": other})


class GatesAreSwapped(TextbookGatedDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        beta, decay = gates["beta"], gates["log_decay"]
        return super().update(memory, key, value, {"beta": decay.exp(), "log_decay": beta.log()})


class OneQuerySeesEverything(TextbookAttention):
    """A decoding shortcut: one query needs no mask."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if shape[2] == 1 and call.state is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


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
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        if visibility is None or visibility.left is None or visibility.key_present is None or call.state is not None:
            return visible
        plain = Visibility(
            visibility.batch, visibility.num_heads, visibility.query_length, visibility.key_length, device
        )
        plain.left, plain.right, plain.offset = visibility.left, visibility.right, visibility.offset
        return plain.dense().expand(shape) & visible.any(-1, keepdim=True)


class SegmentsForgetCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is None or visibility.query_segments is None or visibility.right != 0 or call.state is not None:
            return super().visible(call, shape, device)
        visibility.right = None
        try:
            return super().visible(call, shape, device)
        finally:
            visibility.right = 0


MUTANTS: tuple[Mutant, ...] = (
    Mutant(FalsyScaleIsTheDefault, "agrees_with_definition", "scale=0 falls back to the default"),
    Mutant(WindowOfZeroIsNoWindow, "agrees_with_definition", "`if left:`"),
    Mutant(SubtractsTheTilesMaximumWithoutLse, "agrees_with_definition", "a reference for each tile"),
    Mutant(TakesZeroScoresForHidden, "agrees_with_definition", "masked_fill(s == 0)"),
    Mutant(TakesZeroKeysForPadding, "agrees_with_definition", "a key of zeros is padding"),
    Mutant(NormsAreBoundedBelow, "agrees_with_definition", "an epsilon beside the norm"),
    Mutant(ExpandedSquare, "agrees_with_definition", "(q - k)^2 by cancelling terms"),
    Mutant(LargeWindowsAreRounded, "agrees_with_definition", "a window wider than a tile is rounded up"),
    Mutant(SkipsByTheFirstItemsOffset, "agrees_with_definition", "tiles are skipped by item 0's offset"),
    Mutant(SkipsByTheFirstItemsLength, "agrees_with_definition", "tiles are skipped by item 0's length"),
    Mutant(RightWindowAloneIsCausal, "agrees_with_definition", "(None, r) is read as (None, 0)"),
    Mutant(ClampsWhatAScoreModHides, "agrees_with_definition", "-inf from a score_mod hides nothing"),
    Mutant(ReshapesWhatAScoreModReturns, "agrees_with_definition", "a score_mod of positions alone"),
    Mutant(ClampsValuesLikeHalf, "agrees_with_definition", "values are clamped to float16's range"),
    Mutant(MaximumOfTheTile, "agrees_with_definition", "a maximum per tile overflows the sums before it"),
    Mutant(MaximumStartsAtZero, "agrees_with_definition", "m = 0 where m = -inf is meant"),
    Mutant(WindowStartsAtATile, "agrees_with_definition", "a window's first partial tile is skipped"),
    Mutant(EmptyTilesAreNaN, "agrees_with_definition", "-inf - -inf where a whole tile is hidden"),
    Mutant(CancellingElu, "agrees_with_definition", "elu + 1 cancels far below 0"),
    Mutant(EpsilonBesideTinySums, "agrees_with_definition", "an epsilon that tiny features do not reach"),
    Mutant(NormalisesKeysItself, "agrees_with_definition", "keys are made to unit length inside"),
    Mutant(ClampsItsMemory, "agrees_with_definition", "the memory is clamped"),
    Mutant(DecayIsBounded, "agrees_with_definition", "strong decay is cut off"),
    Mutant(LocalPastALength, "agrees_with_definition", "an approximation past 1024 tokens"),
    Mutant(ClipsValues, "agrees_with_definition", "values are clipped"),
    Mutant(FlushesSmallScores, "agrees_with_definition", "small scores are flushed"),
    Mutant(EmptyRowsByTheirSum, "agrees_with_definition", "scores that sum to 0"),
    Mutant(TiesGoToTheFirst, "agrees_with_definition", "argmax of equal scores"),
    Mutant(SegmentsAreRuns, "agrees_with_definition", "segments are taken for runs"),
    Mutant(DetachedKeys, "gradients_match_definition", "keys are detached"),
    Mutant(DeltaIsMissing, "gradients_match_definition", "dS without the row's delta"),
    Mutant(DeltaOfOneNumber, "gradients_match_definition", "delta over half the width"),
    Mutant(QueryGradientIsNotScaled, "gradients_match_definition", "dQ without scale"),
    Mutant(KeyGradientIsScaledTwice, "gradients_match_definition", "dK with scale twice"),
    Mutant(BackwardTakesTheDefaultScale, "gradients_match_definition", "scale= is not saved for backward"),
    Mutant(QueryAndKeyGradientsAreSwapped, "gradients_match_definition", "dQ and dK are returned swapped"),
    Mutant(FirstHeadOfTheGroup, "gradients_match_definition", "dK of a group is that of its first head"),
    Mutant(MeanOfTheGroup, "gradients_match_definition", "dK of a group is averaged"),
    Mutant(GroupIsFoldedAsTiled, "gradients_match_definition", "groups are folded in the other order"),
    Mutant(BackwardForgetsTheMask, "gradients_match_definition", "causal is ignored backward"),
    Mutant(BackwardForgetsTheWindow, "gradients_match_definition", "the window is ignored backward"),
    Mutant(BackwardOfTheFirstRowBlock, "gradients_match_definition", "the last partial row block gives no gradient"),
    Mutant(BackwardSkipsTheLastKeys, "gradients_match_definition", "dV of the last partial tile is lost"),
    Mutant(LastTileOverwrites, "gradients_match_definition", "dK is stored where it is added"),
    Mutant(BiasHasNoGradient, "gradients_match_definition", "a trained bias receives nothing"),
    Mutant(BiasGradientIsAMean, "gradients_match_definition", "broadcast axes are averaged"),
    Mutant(BiasGradientIsScaled, "gradients_match_definition", "bias is taken for a part of q k^T"),
    Mutant(SinksHaveNoGradient, "gradients_match_definition", "sinks are trained and receive nothing"),
    Mutant(SinksGradientHasTheOtherSign, "gradients_match_definition", "the sign of the sinks' gradient"),
    Mutant(SoftcapHasNoDerivative, "gradients_match_definition", "1 - tanh^2 is missing"),
    Mutant(SoftcapDerivativeOfTheCapped, "gradients_match_definition", "1 - tanh^2 at the wrong place"),
    Mutant(ProbabilitiesWithoutReference, "gradients_match_definition", "exp(s) / exp(lse) overflows"),
    Mutant(GradientsOfTheFirstItem, "gradients_match_definition", "dK of item 0 for all"),
    Mutant(ClipsGradients, "gradients_match_definition", "clipping inside the kernel"),
    Mutant(BackwardRoundsTheWindow, "gradients_match_definition", "a window wider than a tile is rounded backward"),
    Mutant(BackwardOf64IgnoresScale, "gradients_match_definition", "a path for widths of 64 drops scale= backward"),
    Mutant(BackwardSkipsByTheFirstItemsLength, "gradients_match_definition", "tiles are skipped backward by item 0's"),
    Mutant(RepairsWhatAScoreModHides, "gradients_match_definition", "NaN backward where a score_mod hides a row"),
    Mutant(NormaliserIsDetached, "gradients_match_definition", "the saved lse is treated as a constant"),
    Mutant(
        BiasGradientIsNotReduced, "gradients_match_definition", "a bias shared by the batch gets one item's gradient"
    ),
    Mutant(DetachedCarry, "gradients_match_definition", "the carried sums are detached"),
    Mutant(NormaliserIsAConstantBackward, "gradients_match_definition", "z is a constant backward"),
    Mutant(GradientsAreSummedInHalf, "gradients_match_definition", "dK between row blocks in bfloat16"),
    Mutant(TruncatesItsPast, "gradients_match_definition", "the recalled part is detached"),
    Mutant(BetaHasNoGradient, "gradients_match_definition", "the gate is detached"),
    Mutant(RecordingTakesAnotherWindow, "gradients_match_definition", "another path while autograd records"),
    Mutant(TableOf1024Keys, "gradients_match_definition", "dK past 1024 keys is lost"),
    Mutant(ReadsTheFirst64Columns, "agrees_with_definition", "a head width of 64 is written in"),
    Mutant(WholeTilesNeedNoPadding, "agrees_with_definition", "no padding is looked for in whole tiles"),
    Mutant(WidthsOf64AreNotMasked, "agrees_with_definition", "a path for widths of 64 without causal"),
    Mutant(WidthsOf64HaveNoBias, "agrees_with_definition", "a path for widths of 64 without bias"),
    Mutant(EighthOfPowersOfTwo, "agrees_with_definition", "1/8 for 32, 64 and 128"),
    Mutant(DropsTheLastKeyTile, "agrees_with_definition", "keys past the last whole tile are dropped"),
    Mutant(DropsTheLastQueryTile, "agrees_with_definition", "rows past the last whole tile stay 0"),
    Mutant(SqueezesTheOnlyKey, "agrees_with_definition", "the axis of a single key moves"),
    Mutant(ScalesByThePaddedWidth, "agrees_with_definition", "the scale of a padded width"),
    Mutant(SeesTheFirstColumns, "agrees_with_definition", "columns beyond the 64th are left out"),
    Mutant(ReadsColumnsInPairs, "agrees_with_definition", "the last of an odd number of columns"),
    Mutant(WritesValuesInPairs, "agrees_with_definition", "the last of an odd number of value columns"),
    Mutant(ServesHeadsByEights, "agrees_with_definition", "heads past a multiple of eight"),
    Mutant(OneTokenCopiesItsValue, "agrees_with_definition", "one token is its own answer"),
    Mutant(BackwardDropsTheLastTile, "gradients_match_definition", "the last keys get no gradient"),
    Mutant(BackwardInPairs, "gradients_match_definition", "the last of an odd number of columns in backward"),
    Mutant(OneKeyIsCopied, "agrees_with_definition", "one key is copied, visible or not"),
    Mutant(OneHeadIsSqueezed, "agrees_with_definition", "squeeze() takes one axis too many"),
    Mutant(ScaledByThePaddedWidth, "agrees_with_definition", "scale from the padded width"),
    Mutant(ValuesAreAsWideAsKeys, "agrees_with_definition", "d_v > d_k is cut"),
    Mutant(ScaleOnTopOfTheDefault, "agrees_with_definition", "scale= multiplies the default"),
    Mutant(BiasIsScaled, "agrees_with_definition", "bias before scale"),
    Mutant(BiasIsTransposed, "agrees_with_definition", "bias[k, q]"),
    Mutant(BiasOfTheFirstHead, "agrees_with_definition", "one head's bias for all"),
    Mutant(BiasReplacesTheMask, "agrees_with_definition", "causal is lost where a bias is given"),
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
    Mutant(WindowCountsFromTheIndex, "agrees_with_definition", "the window ignores the offset"),
    Mutant(WindowIsSymmetric, "agrees_with_definition", "left serves both sides"),
    Mutant(NegativeOffsetIsClipped, "agrees_with_definition", "a negative offset becomes 0"),
    Mutant(PositionsRunOnInSegments, "agrees_with_definition", "positions do not restart"),
    Mutant(MaskOfTheFirstHead, "agrees_with_definition", "one head's mask for all"),
    Mutant(MaskOrPadding, "agrees_with_definition", "mask OR padding"),
    Mutant(ScaledByTheValueWidth, "agrees_with_definition", "sqrt(d_v) where sqrt(d_k) is meant"),
    Mutant(ScaledInsideAndOutside, "agrees_with_definition", "a caller's scale on top of sqrt(d)"),
    Mutant(AlwaysInBfloat16, "agrees_with_definition", "products in bfloat16, whatever came in"),
    Mutant(NeverInFloat64, "agrees_with_definition", ".float() on float64"),
    Mutant(TransposedWhereSquare, "agrees_with_definition", "k q^T where q k^T is meant"),
    Mutant(RoundsScores, "agrees_with_definition", "scores of ten bits"),
    Mutant(ClampsScores, "agrees_with_definition", "clamp(-50, 50)"),
    Mutant(KeepsTheLargest32, "agrees_with_definition", "32 keys are kept, `exact` is claimed"),
    Mutant(HidesItself, "agrees_with_definition", "the diagonal is hidden"),
    Mutant(HeadsAreSplitWithoutTranspose, "agrees_with_definition", "[B, L, H, D] for [B, H, L, D]"),
    Mutant(FusedPathForgetsTheScore, "agrees_with_definition", "`inner_product` beside a score of its own"),
    Mutant(CountsFromTheFirstQuery, "agrees_with_definition", "positions from the tile"),
    Mutant(LooksUpTheMirroredDistance, "agrees_with_definition", "key - query for query - key"),
    Mutant(FarBucketsWrap, "agrees_with_definition", "a negative index wraps"),
    Mutant(SlopesOfThePowerOfTwo, "agrees_with_definition", "slopes for the next power of two"),
    Mutant(SlopesStartAtOne, "agrees_with_definition", "slopes from head 0"),
    Mutant(NeighboursArePaired, "agrees_with_definition", "pairs of neighbours for pairs of halves"),
    Mutant(AnglesInHalfPrecision, "agrees_with_definition", "positions in bfloat16"),
    Mutant(KeysAreNotTurned, "agrees_with_definition", "queries alone are rotated"),
    Mutant(GaussianOfTheIndex, "agrees_with_definition", "the index where the position is meant"),
    Mutant(NormalisesAgain, "agrees_with_definition", "a factor that is normalised"),
    Mutant(ForgetsTheVector, "agrees_with_definition", "the sum of tanh without v"),
    Mutant(OneVectorForAllHeads, "agrees_with_definition", "v of head 0 for all heads"),
    Mutant(SigmoidForTanh, "agrees_with_definition", "another squashing function"),
    Mutant(AdditiveKeepsTheRoot, "agrees_with_definition", "an additive score over sqrt(d)"),
    Mutant(KeysTakeTheQuerysMatrix, "agrees_with_definition", "W_q on both sides"),
    Mutant(MatrixOfTheKeyHead, "agrees_with_definition", "W_a by key head"),
    Mutant(LuongKeepsTheRoot, "agrees_with_definition", "Luong's score over sqrt(d)"),
    Mutant(KeyBeforeQuery, "agrees_with_definition", "[k; q] where [q; k] is meant"),
    Mutant(ConcatWithoutTanh, "agrees_with_definition", "v^T W [q; k] without tanh"),
    Mutant(LocationCountsFromOne, "agrees_with_definition", "positions from 1"),
    Mutant(NormedOverTheLength, "agrees_with_definition", "the wrong axis is normed"),
    Mutant(TemperatureOfTheItem, "agrees_with_definition", "a temperature per head on the batch axis"),
    Mutant(ForgetsTheKeysNorm, "agrees_with_definition", "-|q|^2 + 2 q k"),
    Mutant(CorrectsInsideChunksOnly, "agrees_with_definition", "a chunk ignores what was held before it"),
    Mutant(BetaOutsideTheSystem, "agrees_with_definition", "beta is left out of the chunk's system"),
    Mutant(FadesByTheFirstToken, "agrees_with_definition", "one gate for a whole chunk"),
    Mutant(RefusesInTheMiddle, "agrees_with_definition", "attend refuses what supports() lets pass"),
    Mutant(KeepsTheOldNumerator, "agrees_with_definition", "the accumulator is not rescaled"),
    Mutant(KeepsTheOldSum, "agrees_with_definition", "the normaliser is not rescaled"),
    Mutant(DropsTheLastPartialTile, "agrees_with_definition", "keys past the last whole tile are lost"),
    Mutant(CountsThePaddingOfATile, "agrees_with_definition", "zeros that fill up a tile take weight"),
    Mutant(SkipsTheDiagonalTile, "agrees_with_definition", "the causal loop ends one tile early"),
    Mutant(HidesNothingInWholeTiles, "agrees_with_definition", "padding is not looked at below the diagonal"),
    Mutant(OneBiasForAllTiles, "agrees_with_definition", "the bias pointer is not advanced"),
    Mutant(BroadcastBiasIsCut, "agrees_with_definition", "a broadcast axis is advanced"),
    Mutant(MaskOfTheTransposedTile, "agrees_with_definition", "the mask's tile is read transposed"),
    Mutant(SinksJoinEveryTile, "agrees_with_definition", "a sink is added once a tile"),
    Mutant(RoundedLog2OfE, "agrees_with_definition", "log2(e) with four decimals"),
    Mutant(EpsilonInTheNormaliser, "agrees_with_definition", "1e-6 beside the sum"),
    Mutant(RowsOfTheNextTileRepeat, "agrees_with_definition", "the last partial row block is misplaced"),
    Mutant(ScaledByTheModelWidth, "agrees_with_definition", "sqrt(embed) where sqrt(head) is meant"),
    Mutant(SoftcapBeforeScale, "agrees_with_definition", "softcap on unscaled scores"),
    Mutant(BiasBeforeSoftcap, "agrees_with_definition", "bias is capped too"),
    Mutant(SubtractsNoMaximum, "agrees_with_definition", "exp overflows"),
    Mutant(TanhBeforeTheSum, "agrees_with_definition", "tanh(a) + tanh(b) where tanh(a + b) is meant"),
    Mutant(SwappedProjections, "agrees_with_definition", "W_q and W_k are swapped"),
    Mutant(TransposedGeneralScore, "agrees_with_definition", "W_a is transposed"),
    Mutant(EluWithoutOne, "agrees_with_definition", "elu without + 1"),
    Mutant(StabilisedPerKey, "agrees_with_definition", "a maximum per key changes relative weights"),
    Mutant(WritesWithoutPrediction, "agrees_with_definition", "the delta rule without its delta"),
    Mutant(BetaScalesTheValueOnly, "agrees_with_definition", "beta misses the recalled part"),
    Mutant(SquareOfTheRelusArgument, "agrees_with_definition", "the positive branch of elu is squared"),
    Mutant(ReluPlusEpsilon, "agrees_with_definition", "relu(x) + eps under the name of relu"),
    Mutant(StabilisedByTheLongestKey, "agrees_with_definition", "a clipped stabiliser over all keys"),
    Mutant(QueryMapForBoth, "agrees_with_definition", "a query's stabiliser on keys"),
    Mutant(CapsItsTable, "agrees_with_definition", "positions wrap at the end of a table"),
    Mutant(TurnsByTheIndex, "agrees_with_definition", "the index where the position is meant"),
    Mutant(TurnsByTheLength, "agrees_with_definition", "angles depend on the call's length"),
    Mutant(NormalisesWithAnEpsilon, "agrees_with_definition", "1e-6 in the normaliser"),
    Mutant(ChunksAreLateByOne, "agrees_with_definition", "the carried sums are one chunk late"),
    Mutant(NormaliserStartsAnewInEachChunk, "agrees_with_definition", "z is not carried"),
    Mutant(ChunkForgetsItsOwnToken, "agrees_with_definition", "tril(-1) inside a chunk"),
    Mutant(LastChunkIsLost, "agrees_with_definition", "the partial chunk reads no carried sums"),
    Mutant(CarriesInHalfPrecision, "agrees_with_definition", "the carried sums in bfloat16"),
    Mutant(CausalIsAlwaysTopLeft, "agrees_with_definition", "the offset is ignored where lengths differ"),
    Mutant(CausalForgetsItsOwnPosition, "agrees_with_definition", "triu(0) where triu(1) is meant"),
    Mutant(MaskDropsCausal, "agrees_with_definition", "an explicit mask replaces causal"),
    Mutant(WindowIsExclusive, "agrees_with_definition", "a window of W - 1 keys to the left"),
    Mutant(KeyMaskHidesQueries, "agrees_with_definition", "the padding mask acts on rows"),
    Mutant(Float64IsComputedInFloat32, "agrees_with_definition", "float64 is declared and computed in float32"),
    Mutant(ErrorHasTheOtherSign, "agrees_with_definition", "S - beta k (v - S^T k)"),
    Mutant(RecallsWithoutBeta, "agrees_with_definition", "beta acts twice on what is recalled"),
    Mutant(BetaOfTheFirstHead, "agrees_with_definition", "one head's gate for all"),
    Mutant(BetaIsSquashedAgain, "agrees_with_definition", "a second sigmoid"),
    Mutant(MemoryIsTransposed, "agrees_with_definition", "S k where S^T k is meant"),
    Mutant(StoresInHalfPrecision, "agrees_with_definition", "the memory is rounded at each token"),
    Mutant(ReadsScaled, "agrees_with_definition", "scale twice"),
    Mutant(ReadsNormed, "agrees_with_definition", "queries are normed inside"),
    Mutant(ReadsBeforeWriting, "agrees_with_definition", "the token at a query's position is not seen"),
    Mutant(DecaysAfterWriting, "agrees_with_definition", "decay after the update"),
    Mutant(RecallsFromTheUnfaded, "agrees_with_definition", "the error forgets the decay"),
    Mutant(DecayIsNoLogarithm, "agrees_with_definition", "1 + g where exp(g) is meant"),
    Mutant(GatesAreSwapped, "agrees_with_definition", "beta and decay are swapped"),
    Mutant(OneQuerySeesEverything, "agrees_with_definition", "a decoding shortcut without masks"),
    Mutant(LongMemoryIsCut, "agrees_with_definition", "keys before the last 512 are forgotten"),
    Mutant(SoftcapAndSinksTogether, "agrees_with_definition", "sinks are capped where scores are"),
    Mutant(GroupedHeadsLoseTheirBias, "agrees_with_definition", "a bias per key head"),
    Mutant(WindowForgetsThePadding, "agrees_with_definition", "window and key_mask together"),
    Mutant(SegmentsForgetCausal, "agrees_with_definition", "segments and causal together"),
    Mutant(FarMemoryIsCut, "agrees_with_definition", "keys before the last 4096 are forgotten"),
)
