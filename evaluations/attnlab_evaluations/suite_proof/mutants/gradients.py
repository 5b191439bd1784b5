"""Mutants whose forward is right and whose backward is not. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class DetachedWeights(TextbookAttention):
    """The weights used carry gradient, the ones returned do not."""

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights.detach() + 0.0 * weights


class SoftcapHasNoSlope(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s + (super().capped(s, call) - s).detach()


class NormaliserIsDetached(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        finite = torch.where(lse == -torch.inf, 0, lse).detach().unsqueeze(-1)
        moved = torch.exp(torch.where(weights > 0, s - finite, 0))
        return torch.where(weights > 0, moved, 0), lse


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


class _MixedWithAnotherMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(weights, value)
        return torch.dropout(weights, p, True) @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.saved_tensors
        kept = torch.dropout(torch.ones_like(weights), ctx.p, True)  # recomputed without the forward's generator state
        return grad @ value.transpose(-1, -2) * kept, (weights * kept).transpose(-1, -2) @ grad, None


class DropoutIsDrawnAgainBackward(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        self.p = p
        return weights

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if not self.p:
            return weights @ v
        result: Tensor = _MixedWithAnotherMask.apply(weights, v, self.p)  # type: ignore[no-untyped-call]
        return result


class BiasGradientIsNotReduced(TextbookAttention):
    """A broadcast bias receives the gradient of its first row only."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        plain = super().adjusted(s, call, scale)
        if call.bias is None:
            return plain
        bias = call.bias.to(s.dtype)
        first = torch.zeros_like(plain)
        first[:1] = 1
        return plain - bias * (1 - first) + bias.detach() * (1 - first)


MUTANTS = (
    Mutant(DetachedWeights, "gradients_flow_through_weights", "returned weights are detached"),
    Mutant(SoftcapHasNoSlope, "gradients_match_finite_differences", "a straight-through softcap"),
    Mutant(NormaliserIsDetached, "gradients_match_definition", "the saved lse is treated as a constant"),
    Mutant(
        BiasGradientIsNotReduced, "gradients_match_definition", "a bias shared by the batch gets one item's gradient"
    ),
    Mutant(ReadsGradOutputAsContiguous, "gradients_honour_the_strides_of_grad_output", "as_strided on grad_output"),
    Mutant(DropoutIsDrawnAgainBackward, "dropout_backward_uses_the_forward_mask", "recomputation draws a new mask"),
    Mutant(
        ClaimsDoubleBackward, "second_derivatives_match_finite_differences", "a backward that is not differentiable"
    ),
)
