"""Mutants that the checks in `checks/modules.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive, wide
from attnlab_evaluations.suite_proof.mutants.dropout import DropoutIsNotSeeded


class DetachedVector(TextbookAdditive):
    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.einsum("bhqka,ha->bhqk", self.hidden(query, key), wide(self.v.data))


class HidesATensor(TextbookAttention):
    """A random temperature that is no parameter and no buffer: state_dict does not carry it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.temperature = 0.5 + float(torch.rand(()))

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) * self.temperature


class ForgetsAParameter(TextbookAttention):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.temperature = torch.nn.Parameter(torch.ones(self.num_heads))


class HoldsALambda(TextbookAttention):
    """A lambda among the attributes: the instance cannot be pickled."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.turned: Callable[[Tensor], Tensor] = lambda x: x.transpose(-1, -2)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q @ self.turned(k)


class DrawsATableOnce(TextbookAttention):
    """A random buffer that state_dict leaves out."""

    table: Tensor

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_buffer("table", 1 + 0.1 * torch.rand(self.num_heads, 1, 1), persistent=False)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) * (self.table.to(q) / self.table.to(q).mean())


MUTANTS: tuple[Mutant, ...] = (
    Mutant(DetachedVector, "gradients_reach_every_parameter", "v.data in the forward"),
    Mutant(HidesATensor, "copies_agree", "a tensor outside the state_dict"),
    Mutant(ForgetsAParameter, "gradients_reach_every_parameter", "a parameter that nothing uses"),
    Mutant(DropoutIsNotSeeded, "recomputation_gives_the_same_gradients", "recomputation draws a new mask"),
    Mutant(HoldsALambda, "copies_agree", "an attribute that does not pickle"),
    Mutant(DrawsATableOnce, "copies_agree", "a random buffer outside the state_dict"),
)
