"""Mutants that the checks in `checks/independence.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.sampled import SampledAttention
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDot, TextbookLuong, wide
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookChunked, TextbookMaps

Role = Literal["query", "key"]
Gates = Mapping[str, Tensor]
Shape = tuple[int, int, int, int]


class OneOffsetForTheBatch(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        visible = super().visible(call, shape, device)
        alike = visibility is not None and isinstance(visibility.offset, Tensor) and visibility.query_segments is None
        return (
            visible[:1].expand(shape)
            if alike and visibility is not None and visibility.key_present is None
            else visible
        )


class NormsByTheBatch(TextbookDot):
    def project_query(self, query: Tensor) -> Tensor:
        q = wide(query)
        return q * (1 + 1e-2 * q.square().mean(0, keepdim=True))


class KeepsProjectedKeysByShape(TextbookLuong):
    """The cache's key is a shape: the second memory of a length is answered with the first."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: dict[Any, Tensor] = {}

    def project_key(self, key: Tensor) -> Tensor:
        if torch.is_grad_enabled() and key.requires_grad:
            return super().project_key(key)
        return self.kept.setdefault((tuple(key.shape), key.dtype), super().project_key(key))


class TrainsWithAnotherScale(TextbookAttention):
    def scale(self, call: Call) -> float:
        return super().scale(call) * (1.1 if self.training else 1.0)


class AveragesWhileTraining(TextbookAttention):
    """A recorded call in training moves a temperature that every later call uses."""

    moved = 1.0

    def scale(self, call: Call) -> float:
        scale = super().scale(call) * self.moved
        if self.training and call.recording:
            self.moved *= 0.99
        return scale


class TrainsKeysAtHalfTheRate(TextbookAttention):
    """In training mode half of what reaches the keys is lost backward."""

    def grouped(self, x: Tensor) -> Tensor:
        x = super().grouped(x)
        return x.detach() / 2 + x / 2 if self.training else x


class ClaimsDeterminism(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        order = torch.randperm(weights.shape[-1], device=v.device)  # as atomic additions arrive in any order
        total = torch.zeros(*weights.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        for j in order.tolist():
            total = total + weights[..., j : j + 1] * v[..., j : j + 1, :]
        return total


class ClaimsBatchInvariance(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, batch_invariant=True)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if weights.shape[0] == 1:
            return super().mixed(weights, v, visible)
        return super().mixed(weights.flip(-1), v.flip(-2), visible)


class HeadsAreTiled(TextbookAttention):
    """k0, k1, k0, k1 where k0, k0, k1, k1 is meant."""

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.num_heads // self.num_kv_heads, 1, 1)


class HeadsTalk(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s + 0.1 * s.mean(dim=1, keepdim=True), visible, sinks)


class OneMaskForAllItems(TextbookAttention):
    """A pair is computed where any item of the batch needs it, and hidden nowhere else."""

    formula = ""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        return super().visible(call, shape, device).any(dim=0, keepdim=True).expand(shape)


class SinksOfAllHeads(TextbookAttention):
    formula = ""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s, visible, None if sinks is None else sinks.mean().expand(sinks.shape))


class BiasOfTheNextHead(TextbookAttention):
    formula = ""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None:
            call.bias = call.bias.roll(1, dims=1)
        return super().adjusted(s, call, scale)


class BiasOfTheNextItem(TextbookAttention):
    formula = ""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None:
            call.bias = call.bias.roll(1, dims=0)
        return super().adjusted(s, call, scale)


class DrawsItsFeaturesAnew(TextbookMaps):
    """A random rotation each call, under a claim of determinism; relu features do not commute with it."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        phi = super().feature_map(x, role=role, positions=positions)
        return phi * (1 + 1e-2 * torch.rand(x.shape[-1], dtype=x.dtype, device=x.device))


class MapsWithDropout(TextbookMaps):
    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return super().feature_map(torch.dropout(x, 0.1, self.training), role=role, positions=positions)


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


class PaddingOfTheFirstItemServesAll(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        return visible[:1].expand(shape) if call.visibility is not None else visible


class RememberedMask(TextbookAttention):
    """The mask of the first length is kept in the module and cut to size."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: Tensor | None = None

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.visibility is None or not call.visibility.only_causal:
            return super().visible(call, shape, device)
        if self.kept is None or self.kept.shape[2] < shape[2] or self.kept.shape[3] < shape[3]:
            self.kept = super().visible(call, shape, device)[:1, :1].clone()
        return self.kept[:, :, -shape[2] :, : shape[3]].expand(shape)


class GroupsReadOneQuery(TextbookDelta):
    """All query heads of a group read with the first one's query."""

    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, query[:, :, :1].expand_as(query))


class RemembersInItself(TextbookDelta):
    """The memory lives in the module, and the next call starts from it."""

    last: Tensor | None = None

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        start = self.last if self.last is not None and self.last.shape == memory.shape else None
        if start is not None and not bool(memory.any()) and not memory.requires_grad:
            memory = start.to(memory)
        following = super().update(memory, key, value, gates)
        self.last = following.detach()
        return following


class OneItemNeedsNoPadding(TextbookAttention):
    """With one item there is nothing to pad, so key_mask is not looked at."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is None or shape[0] != 1 or visibility.pairwise or call.state is not None:
            return super().visible(call, shape, device)
        return torch.ones(shape, dtype=torch.bool, device=device)


class OddHeadIsACopy(TextbookAttention):
    """Heads are taken in pairs; the last of an odd number is that of its neighbour."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        if s.shape[1] % 2 == 0 or s.shape[1] < 3:
            return s
        return torch.cat([s[:, :-1], s[:, -2:-1]], 1)


class InferenceSkipsThePadding(TextbookLinear):
    """Without gradients absent keys are left in."""

    def _features(self, key: Tensor, value: Tensor, visible: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or visible.key_present is None:
            return super()._features(key, value, visible, start, stop)
        present, visible.key_present = visible.key_present, None
        try:
            return super()._features(key, value, visible, start, stop)
        finally:
            visible.key_present = present


class DrawsTheSameAgain(SampledAttention):
    """A generator of its own, seeded in each call."""

    name = ""
    capabilities = replace(SampledAttention.capabilities, random=True)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return super().attend(query, key, value, call)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(OneOffsetForTheBatch, "batch_items_are_independent", "the first item's offset for all"),
    Mutant(NormsByTheBatch, "batch_items_are_independent", "a statistic over the batch"),
    Mutant(KeepsProjectedKeysByShape, "calls_are_independent", "a cache whose key is a shape"),
    Mutant(TrainsWithAnotherScale, "train_and_eval_modes_agree", "train and eval take two paths"),
    Mutant(AveragesWhileTraining, "train_and_eval_modes_agree", "training calls move what later calls use"),
    Mutant(TrainsKeysAtHalfTheRate, "train_and_eval_modes_agree", "another backward in training mode"),
    Mutant(ClaimsDeterminism, "determinism", "sums in any order"),
    Mutant(ClaimsBatchInvariance, "batch_items_are_bitwise_independent", "another reduction order for one item"),
    Mutant(HeadsAreTiled, "grouped_heads_equal_repeated_heads", "repeat where repeat_interleave is meant"),
    Mutant(HeadsTalk, "heads_are_independent", "a mean over heads enters the scores"),
    Mutant(OneMaskForAllItems, "batch_items_are_independent", "a mask is the union over the batch"),
    Mutant(SinksOfAllHeads, "heads_are_independent", "sinks are averaged over heads"),
    Mutant(BiasOfTheNextHead, "heads_are_independent", "a bias is taken from the neighbouring head"),
    Mutant(BiasOfTheNextItem, "batch_items_are_independent", "a bias is taken from the neighbouring item"),
    Mutant(DrawsItsFeaturesAnew, "determinism", "random features are drawn in each call"),
    Mutant(MapsWithDropout, "train_and_eval_modes_agree", "dropout inside the feature map, in training"),
    Mutant(LeavesItsSumsBehind, "calls_are_independent", "sums survive the call"),
    Mutant(PaddingOfTheFirstItemServesAll, "batch_items_are_independent", "a mask is broadcast from item 0"),
    Mutant(RememberedMask, "calls_are_independent", "a mask of another length is reused"),
    Mutant(GroupsReadOneQuery, "grouped_heads_equal_repeated_heads", "a group reads with one query"),
    Mutant(RemembersInItself, "calls_are_independent", "the memory survives the call"),
    Mutant(OneItemNeedsNoPadding, "batch_items_are_independent", "key_mask is ignored for one item"),
    Mutant(OddHeadIsACopy, "heads_are_independent", "heads in pairs"),
    Mutant(InferenceSkipsThePadding, "train_and_eval_modes_agree", "another path without gradients"),
    Mutant(DrawsTheSameAgain, "random_calls_draw_anew", "each call seeds a generator of its own"),
)
