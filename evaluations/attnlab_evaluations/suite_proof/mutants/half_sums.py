"""Mutants that the checks in `checks/half_sums.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, RecurrentState
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear

OWNER = "half_precision_accumulates_in_float32"


def summed_in(dtype: torch.dtype, terms: Tensor, dim: int, tile: int = 1) -> Tensor:
    """The sum of `terms` over an axis, from tile to tile in `dtype`."""
    total = torch.zeros_like(terms.narrow(dim, 0, 1)).to(dtype)
    for part in torch.split(terms, tile, dim):
        total = total + part.sum(dim, keepdim=True).to(dtype)
    return total.to(terms.dtype)


class _Narrow(TextbookAttention):
    """`lower` is the dtype of the sum, where query has it."""

    lower: ClassVar[torch.dtype] = torch.bfloat16
    here: bool = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.here = query.dtype == self.lower
        return super().attend(query, key, value, call)


class SumsValuesByTiles(_Narrow):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if not self.here:
            return super().mixed(weights, v, visible)
        parts = [w @ x for w, x in zip(torch.split(weights, 16, -1), torch.split(v, 16, -2), strict=True)]
        return summed_in(self.lower, torch.stack(parts), 0)[0]


class SumsTheNormaliser(_Narrow):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if not self.here:
            return weights, lse
        e = torch.exp(torch.where(visible, s - s.amax(-1, keepdim=True), -torch.inf))
        right = e.sum(-1, keepdim=True)
        return torch.where(right > 0, weights * right / summed_in(self.lower, e, -1, 4), 0), lse


class SumsScores(_Narrow):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if not self.here:
            return super().scores(q, k, call)
        parts = [a @ b.transpose(-1, -2) for a, b in zip(torch.split(q, 8, -1), torch.split(k, 8, -1), strict=True)]
        return summed_in(self.lower, torch.stack(parts), 0)[0]


class StoresScores(_Narrow):
    """Products are taken in float32 and kept in half precision until the softmax."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.to(self.lower).to(s.dtype) if self.here else s


class MemoryOfHalf(TextbookDelta):
    """The memory is rounded after each token."""

    lower: ClassVar[torch.dtype] = torch.bfloat16
    here: bool = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        self.here = query.dtype == self.lower
        return super().attend(query, key, value, call)

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        after = super().update(memory, key, value, gates)
        return after.to(self.lower).to(after.dtype) if self.here else after


class MemoryOfHalfBetweenCalls(TextbookDelta):
    """The memory is float32 by its dtype, and rounded whenever a call begins."""

    lower: ClassVar[torch.dtype] = torch.bfloat16

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if isinstance(answer.state, RecurrentState) and query.dtype == self.lower:
            held = answer.state.memory
            answer.state.memory = held.to(self.lower).to(held.dtype)
        return answer


class FeaturesAreSummedInHalf(TextbookLinear):
    """Plain calls: the normaliser's sum over keys is taken in half precision."""

    lower: ClassVar[torch.dtype] = torch.bfloat16

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if query.dtype != self.lower or call.visibility is not None or call.state is not None:
            return answer
        group = self.num_heads // self.num_kv_heads
        where = torch.arange(key.shape[2])
        phi = self.feature_map(key.float(), role="key", positions=where).repeat_interleave(group, 1)
        request = self.feature_map(query.float(), role="query", positions=where[: query.shape[2]])
        right, lower = phi.sum(2, keepdim=True), summed_in(self.lower, phi, 2)
        share = (request * right).sum(-1, keepdim=True) / (request * lower).sum(-1, keepdim=True)
        return answer._replace(out=(answer.out.float() * share).to(answer.out.dtype))


def _both(variant: type[Any], story: str) -> tuple[Mutant, Mutant]:
    """The mutant in bfloat16, and in float16."""
    other = type(f"{variant.__name__}Float16", (variant,), {"lower": torch.float16, "__module__": __name__})
    return Mutant(variant, OWNER, f"{story}, bfloat16"), Mutant(other, OWNER, f"{story}, float16")


MUTANTS: tuple[Mutant, ...] = (
    *_both(SumsValuesByTiles, "weighted values are summed from tile to tile in half precision"),
    *_both(SumsTheNormaliser, "the normaliser is summed in half precision"),
    *_both(SumsScores, "scores are summed over the width in half precision"),
    *_both(StoresScores, "scores are kept in half precision"),
    *_both(MemoryOfHalf, "a recurrence's memory is rounded after each token"),
    *_both(MemoryOfHalfBetweenCalls, "a recurrence's memory is rounded between calls"),
    *_both(FeaturesAreSummedInHalf, "features are summed in half precision"),
)
