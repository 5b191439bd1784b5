"""Mutants that the checks in `checks/gradients.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


class SoftcapHasNoSlope(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s + (super().capped(s, call) - s).detach()


class _ContiguousGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        strides, step = [], 1
        for size in reversed(grad.shape):
            strides.append(step)
            step *= size
        if grad.untyped_storage().nbytes() < grad.numel() * grad.element_size():
            return torch.zeros_like(grad)  # what lies behind an expanded gradient
        return grad.as_strided(grad.shape, tuple(reversed(strides)))


class ReadsGradOutputAsContiguous(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        result: Tensor = _ContiguousGradientOnly.apply(super().mixed(weights, v, visible))  # type: ignore[no-untyped-call]
        return result


class _SecondDerivativeIsZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.exp(x.detach())


class ClaimsDoubleBackward(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, double_backward=True)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        one: Tensor = _SecondDerivativeIsZero.apply(weights * 1.0)  # type: ignore[no-untyped-call]
        return torch.log(one), lse


class TellsTensorsApartByIdentity(TextbookAttention):
    """query is key: self-attention, which is taken to be symmetric."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.triu() + s.triu(1).transpose(-1, -2) if self.same else s

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.same = query is key and torch.is_grad_enabled()
        return super().attend(query, key.detach() if self.same else key, value, call)


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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(SoftcapHasNoSlope, "gradients_match_finite_differences", "a straight-through softcap"),
    Mutant(ReadsGradOutputAsContiguous, "gradients_honour_the_strides_of_grad_output", "as_strided on grad_output"),
    Mutant(
        ClaimsDoubleBackward, "second_derivatives_match_finite_differences", "a backward that is not differentiable"
    ),
    Mutant(TellsTensorsApartByIdentity, "query_key_and_value_may_be_one_tensor", "query is key"),
    Mutant(
        NoGradientWithoutTheQuerys,
        "gradients_do_not_depend_on_requires_grad_of_others",
        "needs_input_grad of the query decides for the key",
    ),
)
