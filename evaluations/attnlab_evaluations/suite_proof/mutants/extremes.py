"""Mutants of `checks/extremes.py`: errors at the ends of arguments, special contents and long inputs. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Visibility
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.correct.textbook_scores import (
    SCORE,
    TextbookCosine,
    TextbookDistance,
    TextbookDot,
    wide,
)
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookGatedDelta, TextbookMaps
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _length, _Relu
from attnlab_evaluations.suite_proof.mutants.weights import SubtractsTheTilesMaximum

Shape = tuple[int, int, int, int]
Row = tuple[Tensor, Tensor, Tensor]
Role = Literal["query", "key"]
Gates = Mapping[str, Tensor]


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


class SinksAreNoReference(TextbookTiled):
    """exp(sink - m) with the maximum of the scores alone: a large sink overflows."""

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is None:
            return super().finished(m, z, n, sinks)
        alive = m > -torch.inf
        z = torch.where(alive, z + torch.exp(sinks[:, None, None] - m), 1)
        return torch.where(alive, n / z, 0), torch.where(alive, m + z.log(), -torch.inf)


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


MUTANTS = (
    Mutant(FalsyScaleIsTheDefault, "extreme_arguments_agree_with_definition", "scale=0 falls back to the default"),
    Mutant(WindowOfZeroIsNoWindow, "extreme_arguments_agree_with_definition", "`if left:`"),
    Mutant(SubtractsTheTilesMaximumWithoutLse, "long_inputs_agree_with_definition", "a reference for each tile"),
    Mutant(TakesZeroScoresForHidden, "special_contents_agree_with_definition", "masked_fill(s == 0)"),
    Mutant(TakesZeroKeysForPadding, "special_contents_agree_with_definition", "a key of zeros is padding"),
    Mutant(NormsAreBoundedBelow, "special_contents_agree_with_definition", "an epsilon beside the norm"),
    Mutant(ExpandedSquare, "special_contents_agree_with_definition", "(q - k)^2 by cancelling terms"),
    Mutant(
        LargeWindowsAreRounded, "extreme_arguments_agree_with_definition", "a window wider than a tile is rounded up"
    ),
    Mutant(
        SkipsByTheFirstItemsOffset, "extreme_arguments_agree_with_definition", "tiles are skipped by item 0's offset"
    ),
    Mutant(
        SkipsByTheFirstItemsLength, "extreme_arguments_agree_with_definition", "tiles are skipped by item 0's length"
    ),
    Mutant(RightWindowAloneIsCausal, "extreme_arguments_agree_with_definition", "(None, r) is read as (None, 0)"),
    Mutant(ClampsWhatAScoreModHides, "extreme_arguments_agree_with_definition", "-inf from a score_mod hides nothing"),
    Mutant(ReshapesWhatAScoreModReturns, "extreme_arguments_agree_with_definition", "a score_mod of positions alone"),
    Mutant(ClampsValuesLikeHalf, "special_contents_agree_with_definition", "values are clamped to float16's range"),
    Mutant(
        MaximumOfTheTile, "special_contents_agree_with_definition", "a maximum per tile overflows the sums before it"
    ),
    Mutant(MaximumStartsAtZero, "special_contents_agree_with_definition", "m = 0 where m = -inf is meant"),
    Mutant(WindowStartsAtATile, "long_inputs_agree_with_definition", "a window's first partial tile is skipped"),
    Mutant(EmptyTilesAreNaN, "long_inputs_agree_with_definition", "-inf - -inf where a whole tile is hidden"),
    Mutant(SinksAreNoReference, "extreme_arguments_agree_with_definition", "a large sink overflows"),
    Mutant(CancellingElu, "special_contents_agree_with_definition", "elu + 1 cancels far below 0"),
    Mutant(
        EpsilonBesideTinySums, "special_contents_agree_with_definition", "an epsilon that tiny features do not reach"
    ),
    Mutant(NormalisesKeysItself, "special_contents_agree_with_definition", "keys are made to unit length inside"),
    Mutant(ClampsItsMemory, "special_contents_agree_with_definition", "the memory is clamped"),
    Mutant(DecayIsBounded, "extreme_arguments_agree_with_definition", "strong decay is cut off"),
    Mutant(LocalPastALength, "long_inputs_agree_with_definition", "an approximation past 1024 tokens"),
    Mutant(ClipsValues, "special_contents_agree_with_definition", "values are clipped"),
    Mutant(FlushesSmallScores, "special_contents_agree_with_definition", "small scores are flushed"),
    Mutant(EmptyRowsByTheirSum, "special_contents_agree_with_definition", "scores that sum to 0"),
    Mutant(TiesGoToTheFirst, "special_contents_agree_with_definition", "argmax of equal scores"),
    Mutant(SegmentsAreRuns, "extreme_arguments_agree_with_definition", "segments are taken for runs"),
)
