"""Mutants inside an author's product score: dtype, tiles, caches, positions, reweight. Needs torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab_evaluations.suite_proof.mutants._methods import (
    SCORE,
    TextbookAlibi,
    TextbookDot,
    TextbookLocal,
    TextbookLuong,
    TextbookRelative,
    TextbookRotary,
    wide,
)
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant

# -- products --------------------------------------------------------------------------------------------------


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


class SubtractsTheTilesMaximum(TextbookDot):
    """It cancels in one tile's softmax; not in lse, and not between tiles."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s - s.amax(-1, keepdim=True)


class SubtractsTheTilesMaximumWithoutLse(SubtractsTheTilesMaximum):
    """One tile holds all of a small call; only past the tile does it show."""

    capabilities = replace(SCORE, lse=False, sinks=False, softcap=False, score_mod=False, bias=False)


class DetachedKeys(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query) @ wide(key.detach()).transpose(-1, -2)


class ReadsTheFirst64Columns(TextbookDot):
    """A head width written into the kernel."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return wide(query)[..., :64] @ wide(key)[..., :64].transpose(-1, -2)


class TakesZeroScoresForHidden(TextbookDot):
    """masked_fill(s == 0, -inf), as after a multiplication by a mask."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.masked_fill(s == 0, -torch.inf)


class TakesZeroKeysForPadding(TextbookDot):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.masked_fill((key == 0).all(-1)[:, :, None], -torch.inf)


class HidesItself(TextbookDot):
    """A query may not see its own position, as in a shared query-key space."""

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        if s.shape[-1] != s.shape[-2]:
            return s
        return s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool, device=s.device), -5e4)


class ViewsItsInput(TextbookDot):
    """`view` needs adjacent memory."""

    def project_query(self, query: Tensor) -> Tensor:
        return query.view(-1, query.shape[2], query.shape[3]).view(query.shape)


class HeadsAreSplitWithoutTranspose(TextbookDot):
    """view(B, L, H, D) where the memory is [B, H, L, D]."""

    def project_query(self, query: Tensor) -> Tensor:
        batch, heads, length, width = query.shape
        return query.reshape(batch, length, heads, width).transpose(1, 2)


class NormsByTheBatch(TextbookDot):
    def project_query(self, query: Tensor) -> Tensor:
        q = wide(query)
        return q * (1 + 1e-2 * q.square().mean(0, keepdim=True))


class ScalesKeysInPlace(TextbookDot):
    def project_key(self, key: Tensor) -> Tensor:
        with torch.no_grad():
            key.mul_(2)
            return key.div_(2)


class KeepsProjectedKeysByShape(TextbookLuong):
    """The cache's key is a shape: the second memory of a length is answered with the first."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: dict[Any, Tensor] = {}

    def project_key(self, key: Tensor) -> Tensor:
        if torch.is_grad_enabled() and key.requires_grad:
            return super().project_key(key)
        return self.kept.setdefault((tuple(key.shape), key.dtype), super().project_key(key))


class KeepsItsExpandedMatrix(TextbookLuong):
    """W_a is cast once: training, loading and moving leave the copy behind."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.cast: dict[torch.dtype, Tensor] = {}

    def project_query(self, query: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().project_query(query)
        dtype = wide(query).dtype
        if dtype not in self.cast:
            self.cast[dtype] = wide(self.W_a).detach().to(dtype).clone()
        return wide(query) @ self.cast[dtype]


class FusedPathForgetsTheScore(TextbookRelative):
    """`inner_product` says that the score is a plain product, which it is not."""

    inner_product = True


# -- positions -------------------------------------------------------------------------------------------------


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


# -- reweight --------------------------------------------------------------------------------------------------


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


MUTANTS = (
    Mutant(ScaledByTheValueWidth, "agrees_with_definition", "sqrt(d_v) where sqrt(d_k) is meant"),
    Mutant(ScaledInsideAndOutside, "agrees_with_definition", "a caller's scale on top of sqrt(d)"),
    Mutant(AlwaysInBfloat16, "agrees_with_definition", "products in bfloat16, whatever came in"),
    Mutant(NeverInFloat64, "agrees_with_definition", ".float() on float64"),
    Mutant(TransposedWhereSquare, "agrees_with_definition", "k q^T where q k^T is meant"),
    Mutant(RoundsScores, "agrees_with_definition", "scores of ten bits"),
    Mutant(ClampsScores, "survives_large_scores", "clamp(-50, 50)"),
    Mutant(KeepsTheLargest32, "agrees_with_definition", "32 keys are kept, `exact` is claimed"),
    Mutant(SubtractsTheTilesMaximum, "lse_matches_definition", "a maximum that lse misses"),
    Mutant(SubtractsTheTilesMaximumWithoutLse, "long_inputs_agree_by_rows", "a reference for each tile"),
    Mutant(DetachedKeys, "gradients_match_definition", "keys are detached"),
    Mutant(ReadsTheFirst64Columns, "any_size_agrees_with_definition", "a head width of 64 is written in"),
    Mutant(TakesZeroScoresForHidden, "agrees_on_special_contents", "masked_fill(s == 0)"),
    Mutant(TakesZeroKeysForPadding, "agrees_on_special_contents", "a key of zeros is padding"),
    Mutant(HidesItself, "agrees_with_definition", "the diagonal is hidden"),
    Mutant(ViewsItsInput, "strides_do_not_matter", "view() needs adjacent memory"),
    Mutant(HeadsAreSplitWithoutTranspose, "agrees_with_definition", "[B, L, H, D] for [B, H, L, D]"),
    Mutant(NormsByTheBatch, "batch_items_are_independent", "a statistic over the batch"),
    Mutant(ScalesKeysInPlace, "inputs_are_not_modified", "key *= scale"),
    Mutant(KeepsProjectedKeysByShape, "earlier_calls_leave_no_trace", "a cache whose key is a shape"),
    Mutant(KeepsItsExpandedMatrix, "parameters_are_read_at_each_call", "a copy of a parameter is kept"),
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
)
