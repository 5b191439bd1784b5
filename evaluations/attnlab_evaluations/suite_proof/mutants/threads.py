"""Mutants that the checks in `checks/threads.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear

Shape = tuple[int, int, int, int]


class KeepsTheCallOnItself(TextbookAttention):
    """The mask is read from the module, where the call that came last left it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.call = call
        return super().attend(query, key, value, call)

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        return super().visible(self.call, shape, device)


class KeepsItsAnswerOnItself(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
        self.recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        error = value - self.recalled
        written: Tensor = key.unsqueeze(-1) * (gates["beta"].unsqueeze(-1) * error).unsqueeze(-2)
        return memory + written


class SharesAScratchBuffer(TextbookLinear):
    """Features are written to a buffer that is kept for the next call of that shape."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scratch: dict[Any, Tensor] = {}

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().feature_map(x, role=role, positions=positions)
        kept = self.scratch.setdefault((role, x.shape, x.dtype), torch.empty_like(x))
        torch.add(torch.nn.functional.elu(x), 1, out=kept)
        return kept


class _SavedElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, module: Any) -> Tensor:
        ctx.module = module
        module.saved = weights.detach(), value.detach()
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.module.saved
        return grad @ value.transpose(-1, -2), weights.transpose(-1, -2) @ grad, None


class SavesOnTheModule(TextbookAttention):
    """A backward right after its forward finds its own tensors; a second forward in between replaces them."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return weights @ v
        result: Tensor = _SavedElsewhere.apply(weights, v, self)  # type: ignore[no-untyped-call]
        return result


class _ScaledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        ctx.weights, ctx.value = weights.detach().clone(), value.detach()
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        by_value = ctx.weights.transpose(-1, -2) @ grad
        return torch.mul(grad @ ctx.value.transpose(-1, -2), 1.0, out=ctx.weights).clone(), by_value


class BackwardWritesToWhatItSaved(TextbookAttention):
    """The weights' memory is used again for their gradient: a second backward finds no weights."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        result: Tensor = _ScaledInPlace.apply(weights, v)  # type: ignore[no-untyped-call]
        return result


class CutsByTheNumberOfThreads(TextbookAttention):
    """Keys are shared out between threads in equal parts; what does not divide is left over."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        count = torch.get_num_threads()
        part = max(1, v.shape[-2] // count)
        parts = [weights[..., n * part : (n + 1) * part] @ v[..., n * part : (n + 1) * part, :] for n in range(count)]
        return torch.stack(parts).sum(0)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(KeepsTheCallOnItself, "concurrent_calls_are_independent", "the mask lies on the module"),
    Mutant(KeepsItsAnswerOnItself, "concurrent_calls_are_independent", "a step's result lies on the module"),
    Mutant(SharesAScratchBuffer, "concurrent_calls_are_independent", "a buffer is kept for every shape"),
    Mutant(SavesOnTheModule, "overlapping_backwards_are_independent", "saved tensors lie on the module, not on ctx"),
    Mutant(BackwardWritesToWhatItSaved, "overlapping_backwards_are_independent", "the backward reuses saved memory"),
    Mutant(CutsByTheNumberOfThreads, "number_of_threads_does_not_matter", "a remainder is left over"),
)
