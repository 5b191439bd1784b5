"""Mutants that the checks in `checks/dtypes.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive, TextbookCosine, TextbookDot, wide
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled

Row = tuple[Tensor, Tensor, Tensor]


class HiddenInTheProjectionsDtype(TextbookAdditive):
    """Under autocast the projections arrive in bfloat16 and meet a float32 vector."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(query[:, :, :, None] + key[:, :, None])


class SquaresInHalfPrecision(TextbookCosine):
    """The squared norm of a half-precision vector passes 65504."""

    def project_key(self, key: Tensor) -> Tensor:
        length = key.square().sum(-1, keepdim=True)
        return wide(key) * torch.where(length > 0, length, 1).rsqrt()


class HalfPrecisionScores(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return (q.half() @ k.half().transpose(-1, -2)).to(q.dtype)


class HalfPrecisionSums(TextbookLinear):
    """The sums over keys are kept in the inputs' dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.visibility is not None or call.need_weights:
            return super().attend(query, key, value, call)
        group = self.num_heads // self.num_kv_heads
        q, k = (torch.nn.functional.elu(x) + 1 for x in (query, key.repeat_interleave(group, 1)))
        total = k.sum(dim=-2, keepdim=True)
        mixed = q @ (k.transpose(-1, -2) @ value.repeat_interleave(group, 1))
        return AttentionOutput(mixed / (q * total).sum(dim=-1, keepdim=True))


class KeepsAFloat32Buffer(TextbookAttention):
    """Under autocast the product arrives in bfloat16 and does not fit the buffer."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        product = super().scores(q, k, call)
        columns = torch.arange(k.shape[2], device=q.device).expand(product.shape)
        return torch.zeros(product.shape, dtype=q.dtype, device=q.device).scatter(3, columns, product)


class BiasMustHaveTheQuerysDtype(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        for extra in (call.bias, call.sinks):
            if extra is not None and extra.dtype != query.dtype:
                raise RuntimeError(f"{type(self).__name__}: expected {query.dtype} but found {extra.dtype}")
        return super().attend(query, key, value, call)


class HalfPrecisionAccumulators(TextbookTiled):
    """Between tiles the sums are stored in the inputs' dtype."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        self.narrow_dtype = query.dtype
        return super().attend(query, key, value, call)

    def joined(self, m: Tensor, z: Tensor, n: Tensor, *rest: Any) -> Row:
        higher, new_z, new_n = super().joined(m, z, n, *rest)
        return higher, new_z.to(self.narrow_dtype).to(z.dtype), new_n.to(self.narrow_dtype).to(n.dtype)


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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(HiddenInTheProjectionsDtype, "autocast_agrees", "a projection in autocast's dtype"),
    Mutant(SquaresInHalfPrecision, "scores_may_exceed_half_precision", "a squared norm in float16"),
    Mutant(HalfPrecisionScores, "scores_may_exceed_half_precision", "scores in float16 overflow"),
    Mutant(HalfPrecisionSums, "long_sums_accumulate_in_float32", "a normaliser past float16's range"),
    Mutant(KeepsAFloat32Buffer, "autocast_agrees", "expected Float but found BFloat16"),
    Mutant(BiasMustHaveTheQuerysDtype, "bias_and_sinks_may_have_another_dtype", "a float32 mask beside bfloat16"),
    Mutant(HalfPrecisionAccumulators, "long_sums_accumulate_in_float32", "sums between tiles in half precision"),
    Mutant(FillsWithTheLeastHalf, "scores_may_exceed_half_precision", "finfo(float16).min hides nothing below it"),
    Mutant(ScoresAreStoredInHalf, "scores_may_exceed_half_precision", "scores are stored in float16"),
    Mutant(RepairsWhatOverflowed, "scores_may_exceed_half_precision", "scores are clamped to float16's range"),
    Mutant(AddsUpInHalf, "long_sums_accumulate_in_float32", "a running sum in half precision"),
    Mutant(BackwardStaysInTheLowerDtype, "autocast_gradients_agree", "gradients lose bits under autocast"),
    Mutant(ReturnsFloat32UnderAutocast, "autocast_agrees", "out is wide under autocast"),
)
