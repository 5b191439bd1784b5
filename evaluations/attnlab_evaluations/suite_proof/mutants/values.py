"""Mutants of `checks/values.py`: outputs that differ from the definition. Needs torch."""

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
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Saved, TextbookTiled, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Exp, _outer, _Relu

Shape = tuple[int, int, int, int]
Row = tuple[Tensor, Tensor, Tensor]
Role = Literal["query", "key"]
Gates = Mapping[str, Tensor]


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


# `options` above are facts of the mutant, not arguments of its constructor.
StabilisedPerKey.capabilities = replace(TextbookLinear.capabilities)


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


MUTANTS = (
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
    Mutant(ClampsScores, "large_scores_do_not_overflow", "clamp(-50, 50)"),
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
    Mutant(SubtractsNoMaximum, "large_scores_do_not_overflow", "exp overflows"),
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
