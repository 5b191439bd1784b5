"""Mutants inside an author's learned or normed score: additive, Luong's, cosine, distance. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab_evaluations.suite_proof.mutants._methods import (
    TextbookAdditive,
    TextbookConcat,
    TextbookCosine,
    TextbookDistance,
    TextbookLocation,
    TextbookLuong,
    wide,
)
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant

# -- additive --------------------------------------------------------------------------------------------------


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


class HiddenInTheProjectionsDtype(TextbookAdditive):
    """Under autocast the projections arrive in bfloat16 and meet a float32 vector."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(query[:, :, :, None] + key[:, :, None])


class FactorsWithoutGuard(TextbookAdditive):
    """tanh(a + b) = 1 - 2 / (1 + exp(2a) exp(2b)), where one factor may be infinite and the other 0."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        factors = torch.exp(2 * wide(query))[:, :, :, None] * torch.exp(2 * wide(key))[:, :, None]
        return 1 - 2 / (1 + factors)


class FactorsOfClampedRows(FactorsWithoutGuard):
    """The same with each side held to 40, so that 50 and -43 make tanh of 0 instead of 7."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return super().hidden(query.clamp(-40, 40), key.clamp(-40, 40))


class DetachedVector(TextbookAdditive):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.einsum("bhqka,ha->bhqk", self.hidden(query, key), wide(self.v.data))


# -- Luong -----------------------------------------------------------------------------------------------------


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


class LocationCountsFromTheTile(TextbookLocation):
    """Columns are numbered within the tile: packed sequences and later tiles read the wrong row of W_a."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return query[..., : key.shape[2]]


class LocationCountsFromOne(TextbookLocation):
    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions + 1)


class LocationBeginsAnywhere(TextbookLocation):
    """Rows of W_a are numbered from 0, and the variant claims that only differences of positions count."""

    shift_invariant = True


# -- norms -----------------------------------------------------------------------------------------------------


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


class NormsAreNeverZero(TextbookCosine):
    """x / |x|: a zero vector, as padding holds it, is 0 / 0."""

    def normed(self, x: Tensor) -> Tensor:
        return x / _length(x)


class NormsAreBoundedBelow(TextbookCosine):
    def normed(self, x: Tensor) -> Tensor:
        return x / (_length(x) + 1e-5)


class NormedOverTheLength(TextbookCosine):
    def normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-2)


class TemperatureOfTheItem(TextbookCosine):
    """`tau[:, None, None, None]` scales batch items where there are as many as heads."""

    def project_query(self, query: Tensor) -> Tensor:
        tau = wide(self.log_tau).exp()
        by_item = query.shape[0] == self.num_heads
        return self.normed(wide(query)) * (tau[:, None, None, None] if by_item else tau[:, None, None])


class SquaresInHalfPrecision(TextbookCosine):
    """The squared norm of a half-precision vector passes 65504."""

    def project_key(self, key: Tensor) -> Tensor:
        length = key.square().sum(-1, keepdim=True)
        return wide(key) * torch.where(length > 0, length, 1).rsqrt()


class ExpandedSquare(TextbookDistance):
    """-(q^2 - 2 q k + k^2): far from the origin the terms cancel."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        q, k = wide(query), wide(key)
        squares = q.square().sum(-1)[..., :, None] + k.square().sum(-1)[..., None, :]
        return 2 * q @ k.transpose(-1, -2) - squares


class ForgetsTheKeysNorm(TextbookDistance):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return 2 * wide(query) @ wide(key).transpose(-1, -2) - wide(query).square().sum(-1)[..., None]


class ForgetsTheQuerysNorm(TextbookDistance):
    """It cancels in the softmax, and not in lse."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return 2 * wide(query) @ wide(key).transpose(-1, -2) - wide(key).square().sum(-1)[..., None, :]


MUTANTS = (
    Mutant(ForgetsTheVector, "agrees_with_definition", "the sum of tanh without v"),
    Mutant(OneVectorForAllHeads, "agrees_with_definition", "v of head 0 for all heads"),
    Mutant(SigmoidForTanh, "agrees_with_definition", "another squashing function"),
    Mutant(AdditiveKeepsTheRoot, "agrees_with_definition", "an additive score over sqrt(d)"),
    Mutant(KeysTakeTheQuerysMatrix, "agrees_with_definition", "W_q on both sides"),
    Mutant(HiddenInTheProjectionsDtype, "autocast_agrees", "a projection in autocast's dtype"),
    Mutant(FactorsWithoutGuard, "golden_cases_are_reproduced", "exp(2a) exp(2b) without a guard"),
    Mutant(FactorsOfClampedRows, "golden_cases_are_reproduced", "exp(2a) exp(2b) of clamped rows"),
    Mutant(DetachedVector, "gradients_reach_every_parameter", "v.data in the forward"),
    Mutant(MatrixOfTheKeyHead, "agrees_with_definition", "W_a by key head"),
    Mutant(LuongKeepsTheRoot, "agrees_with_definition", "Luong's score over sqrt(d)"),
    Mutant(KeyBeforeQuery, "agrees_with_definition", "[k; q] where [q; k] is meant"),
    Mutant(ConcatWithoutTanh, "agrees_with_definition", "v^T W [q; k] without tanh"),
    Mutant(LocationCountsFromTheTile, "packed_sequences_equal_separate_ones", "columns of the tile"),
    Mutant(LocationBeginsAnywhere, "a_sequence_may_begin_anywhere", "an absolute position called relative"),
    Mutant(LocationCountsFromOne, "agrees_with_definition", "positions from 1"),
    Mutant(NormsAreNeverZero, "absent_slots_reach_no_gradient", "0 / 0 at a zero vector"),
    Mutant(NormsAreBoundedBelow, "agrees_on_special_contents", "an epsilon beside the norm"),
    Mutant(NormedOverTheLength, "agrees_with_definition", "the wrong axis is normed"),
    Mutant(TemperatureOfTheItem, "agrees_with_definition", "a temperature per head on the batch axis"),
    Mutant(SquaresInHalfPrecision, "scores_may_exceed_half_precision", "a squared norm in float16"),
    Mutant(ExpandedSquare, "agrees_on_special_contents", "(q - k)^2 by cancelling terms"),
    Mutant(ForgetsTheKeysNorm, "agrees_with_definition", "-|q|^2 + 2 q k"),
    Mutant(ForgetsTheQuerysNorm, "lse_matches_definition", "a term that cancels in the softmax alone"),
)
