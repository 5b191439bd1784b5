"""Mutants that show only at common widths, past a tile, between items of unlike lengths, or in a rarer argument. Needs torch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import Reason
from attnlab.errors import UnsupportedRequest
from attnlab.request import Request
from attnlab.visibility import Visibility
from attnlab_evaluations.suite_proof.mutants._methods import TextbookLuong, wide
from attnlab_evaluations.suite_proof.mutants._sums import TextbookMaps
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._tiled import Gradients, Saved, TextbookTiled, Tile

Shape = tuple[int, int, int, int]


class LargeWindowsAreRounded(TextbookTiled):
    """A window wider than a tile is rounded up to whole tiles."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        seen = call.visibility
        if seen is not None and seen.left is not None and seen.left > self.side:
            seen.left = -(-seen.left // self.side) * self.side
        return super().attend(query, key, value, call)


class BackwardRoundsTheWindow(TextbookTiled):
    def backward_tile(self, call: Call, seen: Visibility, *rest: Any) -> None:
        left = seen.left
        if left is not None and left > self.side:
            seen.left = -(-left // self.side) * self.side
        super().backward_tile(call, seen, *rest)
        seen.left = left


class WholeTilesNeedNoPadding(TextbookTiled):
    """Where keys fill their tiles nothing was padded, so the padding mask is not looked at."""

    def hidden(self, s: Tensor, seen: Visibility, t: Tile) -> Tensor:
        present = seen.key_present
        if seen.key_length % 64 == 0:
            seen.key_present = None
        s = super().hidden(s, seen, t)
        seen.key_present = present
        return s


class WidthsOf64AreNotMasked(TextbookAttention):
    """The path for widths of 64 and 128 knows no causal bound."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if self.key_dim not in (64, 128) or seen is None or not seen.only_causal:
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


class BackwardOf64IgnoresScale(TextbookTiled):
    def backward_tile(
        self, call: Call, seen: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        before = into.query.clone()
        super().backward_tile(call, seen, t, saved, d_out, delta, into)
        if self.key_dim in (64, 128) and call.scale is not None:
            into.query.copy_(before + (into.query - before) * self.key_dim**-0.5 / call.scale)


class PositionsInTheQuerysDtype(TextbookAttention):
    """arange(dtype=query.dtype): bfloat16 counts to 256."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.counted_in = query.dtype
        return super().attend(query, key, value, call)

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or not seen.only_causal or seen.query_positions.dim() != 1:
            return super().visible(call, shape, device)
        q, k = (x.to(self.counted_in) for x in (seen.query_positions, seen.key_positions))
        seen.right = None
        rest = super().visible(call, shape, device)
        seen.right = 0
        return rest & (k <= q[:, None])


def _whole_tiles(tokens: int, side: int) -> int:
    return -(-tokens // side) * side


class SkipsByTheFirstItemsOffset(TextbookTiled):
    """Tiles past the first item's causal bound are skipped for all."""

    def reach(self, seen: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(seen, q0, q1)
        if not isinstance(seen.offset, Tensor) or seen.right is None or seen.query_segments is not None:
            return first, last
        return first, min(last, max(first, _whole_tiles(int(seen.offset[0]) + q1 + seen.right, self.side)))


class SkipsByTheFirstItemsLength(TextbookTiled):
    """Tiles past the first item's last key are skipped for all."""

    def reach(self, seen: Visibility, q0: int, q1: int) -> tuple[int, int]:
        first, last = super().reach(seen, q0, q1)
        if seen.key_present is None or seen.query_segments is not None:
            return first, last
        held = torch.where(seen.key_present[0], torch.arange(1, 1 + seen.key_length), 0).max()
        return first, min(last, max(first, _whole_tiles(int(held), self.side)))


class BackwardSkipsByTheFirstItemsLength(TextbookTiled):
    def backward_tile(self, call: Call, seen: Visibility, t: Tile, *rest: Any) -> None:
        present = seen.key_present
        if present is None or seen.query_segments is not None or bool(present[0, t.k0 :].any()):
            super().backward_tile(call, seen, t, *rest)


class RightWindowAloneIsCausal(TextbookAttention):
    """Without a left bound a right one is read as 0."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is None or seen.left is not None or seen.right is None or call.state is not None:
            return super().visible(call, shape, device)
        right, seen.right = seen.right, min(seen.right, 0)
        visible = super().visible(call, shape, device)
        seen.right = right
        return visible


class ClampsWhatAScoreModHides(TextbookAttention):
    """-inf from a score_mod becomes -1e4."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        found = super().modified(s, call)
        return found if call.score_mod is None else found.clamp(min=-1e4)


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


class ReshapesWhatAScoreModReturns(TextbookAttention):
    """What a score_mod returns is taken to be as large as the scores."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        return super().modified(s, call).reshape(s.shape)


class RepairsTheWeightsThatItShows(TextbookAttention):
    """Of rows that a bias hides, the weights that are returned are repaired after the softmax: NaN backward."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        hidden = s.masked_fill(~visible, -torch.inf)
        self.repaired = weights if sinks is not None else torch.softmax(hidden, -1).nan_to_num(0)
        return weights, lse

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return self.repaired


class LseOfTheLastSplit(TextbookAttention):
    """Keys are split at 256 and out is merged; lse is that of the last part."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if s.shape[-1] > 256 and sinks is None:
            lse = super().normalised(s[..., 256:], visible[..., 256:], sinks)[1]
        return weights, lse


class WeightsEndAt256(TextbookAttention):
    """The buffer that weights are returned in is 256 keys wide."""

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights * (torch.arange(weights.shape[-1], device=weights.device) < 256)


class ClampsValuesLikeHalf(TextbookAttention):
    """A remedy for float16's range that acts on every dtype."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v.clamp(-65504, 65504), visible)


class AnotherMapIsSquared(TextbookMaps):
    """One of the maps that the option offers, and not the default, is wrong."""

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        features = super().feature_map(x, role=role, positions=positions)
        return features**2 if self.options["feature_map"] == "relu" else features


class ConcatForgetsItsVector(TextbookLuong):
    """Only another score than the default is wrong: concat without v."""

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.options["score"] == "concat":
            return torch.tanh(wide(query)[:, :, :, None] + wide(key)[:, :, None]).sum(-1)
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions)


class ReadsASizeThatMayBeLeftOut(TextbookAttention):
    """num_heads // num_kv_heads before the default is settled."""

    def __init__(self, *, num_heads: int, num_kv_heads: Any = None, **sizes: Any) -> None:
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads, **sizes)
        self.group = num_heads // num_kv_heads


class GivesTheFirstReason(TextbookLinear):
    def supports(self, request: Request) -> list[Reason]:
        return super().supports(request)[:1]


class RefusesInTheMiddle(TextbookAttention):
    """A combination is refused by attend, and supports() knows nothing of it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        seen = call.visibility
        if seen is not None and seen.left is not None and self.num_heads != self.num_kv_heads:
            reason = Reason("window", "a window with grouped heads", "as many key/value heads")
            raise UnsupportedRequest(f"{self.name} does not support {reason}", [reason])
        return super().attend(query, key, value, call)


MUTANTS = (
    Mutant(LargeWindowsAreRounded, "agrees_at_the_ends_of_arguments", "a window wider than a tile is rounded up"),
    Mutant(BackwardRoundsTheWindow, "gradients_match_definition", "a window wider than a tile is rounded backward"),
    Mutant(WholeTilesNeedNoPadding, "any_size_agrees_with_definition", "no padding is looked for in whole tiles"),
    Mutant(WidthsOf64AreNotMasked, "any_size_agrees_with_definition", "a path for widths of 64 without causal"),
    Mutant(WidthsOf64HaveNoBias, "any_size_agrees_with_definition", "a path for widths of 64 without bias"),
    Mutant(EighthOfPowersOfTwo, "any_size_agrees_with_definition", "1/8 for 32, 64 and 128"),
    Mutant(BackwardOf64IgnoresScale, "gradients_match_definition", "a path for widths of 64 drops scale= backward"),
    Mutant(PositionsInTheQuerysDtype, "hidden_pairs_have_no_influence", "positions are counted in bfloat16"),
    Mutant(SkipsByTheFirstItemsOffset, "agrees_at_the_ends_of_arguments", "tiles are skipped by item 0's offset"),
    Mutant(SkipsByTheFirstItemsLength, "agrees_at_the_ends_of_arguments", "tiles are skipped by item 0's length"),
    Mutant(BackwardSkipsByTheFirstItemsLength, "gradients_match_definition", "tiles are skipped backward by item 0's"),
    Mutant(RightWindowAloneIsCausal, "agrees_at_the_ends_of_arguments", "(None, r) is read as (None, 0)"),
    Mutant(ClampsWhatAScoreModHides, "agrees_at_the_ends_of_arguments", "-inf from a score_mod hides nothing"),
    Mutant(RepairsWhatAScoreModHides, "gradients_match_definition", "NaN backward where a score_mod hides a row"),
    Mutant(ReshapesWhatAScoreModReturns, "agrees_at_the_ends_of_arguments", "a score_mod of positions alone"),
    Mutant(RepairsTheWeightsThatItShows, "gradients_flow_through_weights", "NaN through the weights of dead rows"),
    Mutant(LseOfTheLastSplit, "lse_matches_definition", "lse of the last part of the keys"),
    Mutant(WeightsEndAt256, "weights_match_definition", "weights past a buffer's 256 keys are 0"),
    Mutant(ClampsValuesLikeHalf, "agrees_on_special_contents", "values are clamped to float16's range"),
    Mutant(AnotherMapIsSquared, "options_are_honoured", "another choice than the default is wrong"),
    Mutant(ConcatForgetsItsVector, "options_are_honoured", "another score than the default is wrong"),
    Mutant(ReadsASizeThatMayBeLeftOut, "sizes_are_kept_and_judged", "num_kv_heads=None is divided by"),
    Mutant(GivesTheFirstReason, "supports_names_what_is_refused", "only the first reason is listed"),
    Mutant(RefusesInTheMiddle, "agrees_with_definition", "attend refuses what supports() lets pass"),
)
