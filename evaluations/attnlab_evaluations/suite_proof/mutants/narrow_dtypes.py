"""Mutants that show in half precision, in float64 or under autocast. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._methods import TextbookDot, wide
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention
from attnlab_evaluations.suite_proof.mutants._tiled import Gradients, Saved, TextbookTiled


class Float64IsComputedInFloat32(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if query.dtype != torch.float64 or call.state is not None:
            return super().attend(query, key, value, call)
        answer = super().attend(query.float(), key.float(), value.float(), call)
        weights, lse = (None if x is None else x.double() for x in (answer.weights, answer.lse))
        return AttentionOutput(answer.out.double(), weights, lse, answer.state)


class FillsWithTheLeastHalf(TextbookAttention):
    """finfo(query.dtype).min, which a score of 1e5 passes in half precision."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.least = torch.finfo(query.dtype).min
        return super().attend(query, key, value, call)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.least < -1e30:
            return super().normalised(s, visible, sinks)
        sees = visible.any(-1, keepdim=True)
        return super().normalised(s.masked_fill(~visible, self.least), visible | sees, sinks)


class ScoresAreStoredInHalf(TextbookDot):
    """The product is taken in float32 and stored in the inputs' dtype, before the scale."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return super().scores(query, key, **positions).to(query.dtype)


class RepairsWhatOverflowed(TextbookDot):
    """float16 products past 65504 become the largest number instead of inf."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s.clamp(-65504, 65504) if query.dtype == torch.float16 else s


class AddsUpInHalf(TextbookAttention):
    """The average over keys is a running sum in the inputs' dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.narrow_dtype = query.dtype
        return super().attend(query, key, value, call)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if self.narrow_dtype in (torch.float32, torch.float64):
            return super().mixed(weights, v, visible)
        total = torch.zeros_like(weights[..., :1] * v[..., :1, :]).to(self.narrow_dtype)
        for j in range(0, v.shape[-2], 8):
            part = slice(j, j + 8)
            total = total + (weights[..., part] @ v[..., part, :]).to(self.narrow_dtype)
        return total.to(v.dtype)


class BackwardStaysInTheLowerDtype(TextbookTiled):
    """Under autocast backward runs outside of it: the saved tensors are wide, grad_out is not, and nobody casts."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        under = torch.is_autocast_enabled(query.device.type)
        q, k, v = (_rounded(x) if under else x for x in (query, key, value))
        return super().attend(q, k, v, call)


def _rounded(x: Tensor) -> Tensor:
    rounded: Tensor = _Rounded.apply(x)  # type: ignore[no-untyped-call]
    return rounded


class _Rounded(torch.autograd.Function):
    """The same numbers; a gradient with six bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(grad.float())
        return torch.ldexp((fraction * 64).round() / 64, exponent).to(grad.dtype)


class ReturnsFloat32UnderAutocast(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        under = torch.is_autocast_enabled(query.device.type)
        return answer._replace(out=answer.out.float()) if under else answer


class GradientsAreSummedInHalf(TextbookTiled):
    """dK and dV are stored in the inputs' dtype after each row block."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.narrow_dtype = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
        return super().attend(query, key, value, call)

    def backward_tile(self, *args: Any) -> None:
        into: Gradients = args[-1]
        saved: Saved = args[3]
        super().backward_tile(*args)
        if saved.query.dtype == torch.float32:
            into.key.copy_(into.key.to(self.narrow_dtype))


MUTANTS = (
    Mutant(Float64IsComputedInFloat32, "agrees_with_definition", "float64 is declared and computed in float32"),
    Mutant(FillsWithTheLeastHalf, "scores_may_exceed_half_precision", "finfo(float16).min hides nothing below it"),
    Mutant(ScoresAreStoredInHalf, "scores_may_exceed_half_precision", "scores are stored in float16"),
    Mutant(RepairsWhatOverflowed, "scores_may_exceed_half_precision", "scores are clamped to float16's range"),
    Mutant(AddsUpInHalf, "sums_are_taken_in_float32", "a running sum in half precision"),
    Mutant(BackwardStaysInTheLowerDtype, "autocast_gradients_agree", "gradients lose bits under autocast"),
    Mutant(ReturnsFloat32UnderAutocast, "autocast_agrees", "out is wide under autocast"),
    Mutant(GradientsAreSummedInHalf, "gradients_match_definition", "dK between row blocks in bfloat16"),
)
