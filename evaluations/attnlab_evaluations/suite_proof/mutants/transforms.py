"""Mutants that the checks in `checks/transforms.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookLuong, wide


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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(KeepsItsExpandedMatrix, "parameters_are_read_at_each_call", "a copy of a parameter is kept"),
    Mutant(CopiesItsWeightInTheConstructor, "parameters_are_read_at_each_call", "a copy made in __init__"),
    Mutant(KeepsItsWeightInEval, "parameters_are_read_at_each_call", "weights merged at the first eval call"),
    Mutant(ListsItsParameters, "functional_gradients_agree", "a second reference to a parameter"),
    Mutant(MappedAxisIsTakenToBeFirst, "vmap_equals_a_loop", "a vmap rule that ignores in_dims"),
)
