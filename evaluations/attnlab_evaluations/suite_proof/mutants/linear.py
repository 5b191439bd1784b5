"""Mutants of kernelised attention: the map, the normaliser, what passes from chunk to chunk. Needs torch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._sums import TextbookChunked, TextbookCosformer, TextbookMaps
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant

Role = Literal["query", "key"]


class _Relu(TextbookMaps):
    """relu where nothing else is named."""

    def __init__(self, *, feature_map: str = "relu", **sizes: Any) -> None:
        super().__init__(feature_map=feature_map, **sizes)


class _Exp(TextbookMaps):
    def __init__(self, *, feature_map: str = "exp", **sizes: Any) -> None:
        super().__init__(feature_map=feature_map, **sizes)


class SquareOfTheRelusArgument(TextbookMaps):
    """elu(x) + 1 computed as exp(x) below 0 and x^2 + 1 above."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.where(x > 0, x.square() + 1, x.clamp(max=0).exp())


class CancellingElu(TextbookMaps):
    """(exp(x) - 1) + 1 far below 0 is 0 in float32."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.where(x > 0, x, (x.clamp(max=0).exp() * 2**10).round() / 2**10 - 1) + 1


class ReluPlusEpsilon(_Relu):
    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return x.relu() + 1e-3


class StabilisedByTheLongestKey(_Exp):
    """One maximum over all keys, taken from what a causal query may not see, and clipped at 0 below it."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        if role == "query" or not x.shape[2]:
            return super().feature_map(x, role=role, positions=positions)
        return torch.exp((x - x.amax((-2, -1), keepdim=True)).clamp(min=-4))


class SoftmaxOverTheTokens(_Exp):
    """Keys are normalised over the length: causal queries see the future in it, and padding counts."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.softmax(x, dim=-2 if role == "key" else -1)


class QueryMapForBoth(_Exp):
    """The query's row maximum is divided out of keys too, where it does not cancel."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return super().feature_map(x, role="query", positions=positions)


class DrawsItsFeaturesAnew(TextbookMaps):
    """A random rotation each call, under a claim of determinism; relu features do not commute with it."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        phi = super().feature_map(x, role=role, positions=positions)
        return phi * (1 + 1e-2 * torch.rand(x.shape[-1], dtype=x.dtype, device=x.device))


class MapsWithDropout(TextbookMaps):
    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return super().feature_map(torch.dropout(x, 0.1, self.training), role=role, positions=positions)


class WritesIntoWhatItMaps(TextbookMaps):
    """relu_ on the keys that the state, or the caller, still holds."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        if role == "key" and not torch.is_grad_enabled():
            x.add_(1).sub_(1)
        return super().feature_map(x, role=role, positions=positions)


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


class ClaimsToBeNormalised(TextbookMaps):
    """Sums are divided by the number of keys."""

    normalise = False

    def default_scale(self) -> float | None:
        return None


class NormalisesWithAnEpsilon(TextbookChunked):
    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return n / (z + 1e-6)


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


class ChunkSeesItsOwnFuture(TextbookChunked):
    def inner(self, products: Tensor) -> Tensor:
        return products


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


class DetachedCarry(TextbookChunked):
    """No gradient passes a chunk's border."""

    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, total = super().carried(sums, total, k, v)
        return sums.detach(), total.detach()


class CarriesInHalfPrecision(TextbookChunked):
    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums, total = super().carried(sums, total, k, v)
        return sums.bfloat16().to(sums.dtype), total


class NormaliserIsAConstantBackward(TextbookChunked):
    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return super().divided(n, z.detach())


class LeavesItsSumsBehind(TextbookChunked):
    """The sums of a call are the next one's beginning."""

    kept: tuple[Tensor, Tensor] | None = None

    def scanned(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().scanned(q, k, v)
        shape = (*k.shape[:2], k.shape[3], v.shape[3])
        if self.kept is not None and self.kept[0].shape == shape and self.kept[0].dtype == k.dtype:
            n, z = self.read(q, *self.kept)
            out = out + 1e-2 * n / (1 + z)
        self.kept = tuple(x.detach() for x in self.carried(k.new_zeros(shape), k.new_zeros(*shape[:3], 1), k, v))  # type: ignore[assignment]
        return out


MUTANTS = (
    Mutant(SquareOfTheRelusArgument, "agrees_with_definition", "the positive branch of elu is squared"),
    Mutant(CancellingElu, "agrees_on_special_contents", "elu + 1 cancels far below 0"),
    Mutant(ReluPlusEpsilon, "agrees_with_definition", "relu(x) + eps under the name of relu"),
    Mutant(StabilisedByTheLongestKey, "agrees_with_definition", "a clipped stabiliser over all keys"),
    Mutant(SoftmaxOverTheTokens, "the_future_leaves_the_past", "features are normalised over the length"),
    Mutant(QueryMapForBoth, "agrees_with_definition", "a query's stabiliser on keys"),
    Mutant(DrawsItsFeaturesAnew, "repetition_gives_the_same_bits", "random features are drawn in each call"),
    Mutant(MapsWithDropout, "modes_agree", "dropout inside the feature map, in training"),
    Mutant(WritesIntoWhatItMaps, "inputs_are_not_modified", "an in-place activation"),
    Mutant(CapsItsTable, "agrees_with_definition", "positions wrap at the end of a table"),
    Mutant(TurnsByTheIndex, "agrees_with_definition", "the index where the position is meant"),
    Mutant(TurnsByTheLength, "agrees_with_definition", "angles depend on the call's length"),
    Mutant(ClaimsToBeNormalised, "equal_values_come_through", "`normalised` is claimed of plain sums"),
    Mutant(NormalisesWithAnEpsilon, "agrees_with_definition", "1e-6 in the normaliser"),
    Mutant(EpsilonBesideTinySums, "agrees_on_special_contents", "an epsilon that tiny features do not reach"),
    Mutant(ChunksAreLateByOne, "agrees_with_definition", "the carried sums are one chunk late"),
    Mutant(NormaliserStartsAnewInEachChunk, "agrees_with_definition", "z is not carried"),
    Mutant(ChunkSeesItsOwnFuture, "the_future_leaves_the_past", "no causal mask inside a chunk"),
    Mutant(ChunkForgetsItsOwnToken, "agrees_with_definition", "tril(-1) inside a chunk"),
    Mutant(LastChunkIsLost, "agrees_with_definition", "the partial chunk reads no carried sums"),
    Mutant(DetachedCarry, "gradients_match_definition", "the carried sums are detached"),
    Mutant(CarriesInHalfPrecision, "agrees_with_definition", "the carried sums in bfloat16"),
    Mutant(NormaliserIsAConstantBackward, "gradients_match_definition", "z is a constant backward"),
    Mutant(LeavesItsSumsBehind, "earlier_calls_leave_no_trace", "sums survive the call"),
)
