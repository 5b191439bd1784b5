"""Mutants whose parameters or gradients come from elsewhere than a call says: torch.func brings them to light. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.call import Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class LearnedTextbook(TextbookAttention):
    """`q^T W_a k`, correct: Luong's general score."""

    formula = "multiplicative"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {}
        self.W_a = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, with the variance of a linear layer's fan-in."""
        nn.init.normal_(self.W_a, std=self.key_dim**-0.5)

    def scale(self, call: Call) -> float:
        return 1.0 if call.scale is None else float(call.scale)

    def weight(self) -> Tensor:
        return self.W_a

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q @ self.weight().to(q.dtype) @ k.transpose(-1, -2)


class CopiesItsWeightInTheConstructor(LearnedTextbook):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept = self.W_a.detach().clone()

    def weight(self) -> Tensor:
        return self.W_a if torch.is_grad_enabled() else self.kept


class KeepsItsWeightInEval(LearnedTextbook):
    """What an adapter that merges its weights for inference does, without ever taking them apart again."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: Tensor | None = None

    def weight(self) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return self.W_a
        if self.kept is None:
            self.kept = self.W_a.detach().clone()
        return self.kept


class ListsItsParameters(LearnedTextbook):
    """A second reference: what functional_call swaps in is not what is read."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept = [self.W_a]

    def weight(self) -> Tensor:
        return self.kept[0]


class _MixedByRule(torch.autograd.Function):
    @staticmethod
    def forward(weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, value = ctx.saved_tensors
        return grad @ value.transpose(-1, -2), weights.transpose(-1, -2) @ grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, weights: Tensor, value: Tensor) -> tuple[Tensor, int]:
        return weights @ value, 0  # whatever in_dims says


class MappedAxisIsTakenToBeFirst(TextbookAttention):
    def grouped(self, x: Tensor) -> Tensor:
        return x if self.num_heads == self.num_kv_heads else super().grouped(x)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        result: Tensor = _MixedByRule.apply(weights, v)  # type: ignore[no-untyped-call]
        return result


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
    Mutant(CopiesItsWeightInTheConstructor, "parameters_are_read_at_each_call", "a copy made in __init__"),
    Mutant(KeepsItsWeightInEval, "parameters_are_read_at_each_call", "weights merged at the first eval call"),
    Mutant(ListsItsParameters, "functional_gradients_agree", "a second reference to a parameter"),
    Mutant(MappedAxisIsTakenToBeFirst, "a_mapped_axis_equals_a_loop", "a vmap rule that ignores in_dims"),
    Mutant(
        NoGradientWithoutTheQuerys, "a_gradient_is_the_same_alone", "needs_input_grad of the query decides for the key"
    ),
)
