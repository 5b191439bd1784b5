"""Mutants of `checks/requiring.py`: outputs that depend on which tensor requires a gradient. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


class _ScoredForTheQuery(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return q @ k.transpose(-1, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, k = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad @ k, grad.transpose(-1, -2) @ q


class NoGradientWithoutTheQuerys(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        result: Tensor = _ScoredForTheQuery.apply(q, k)  # type: ignore[no-untyped-call]
        return result


MUTANTS = (
    Mutant(
        NoGradientWithoutTheQuerys, "a_gradient_is_the_same_alone", "needs_input_grad of the query decides for the key"
    ),
)
