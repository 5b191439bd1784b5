"""Mutants in layout, ownership, modes, dropout and refusals. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import Reason
from attnlab.request import Request
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear, before_the_gate


class AlwaysFloat32(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer._replace(out=answer.out.to(torch.float32))


class ReturnsWhatWasNotAsked(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer if answer.weights is not None else answer._replace(weights=query.new_zeros(1))


class ReadsQueryAsContiguous(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if query.untyped_storage().nbytes() >= query.numel() * query.element_size() and not query.is_contiguous():
            query = query.as_strided(query.shape, torch.empty(query.shape).stride(), query.storage_offset())
        return super().attend(query, key, value, call)


class ReadsValueAsContiguous(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if value.transpose(1, 2).is_contiguous():
            value = value.transpose(1, 2).reshape(value.shape)
        return super().attend(query, key, value, call)


class ScalesTheQueryInPlace(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        with torch.no_grad():
            query.mul_(2.0)
            query.div_(2.0)
        return super().attend(query, key, value, call)


class ReturnsTheValueItself(TextbookAttention):
    """One key: the softmax is 1, so the value is handed back."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        plain = call.visibility is None and call.sinks is None and call.state is None and not call.dropout_p
        if (
            plain
            and key.shape[2] == 1
            and self.num_heads == self.num_kv_heads
            and not (call.need_weights or call.need_lse)
        ):
            return AttentionOutput(value.expand(-1, -1, query.shape[2], -1))
        return super().attend(query, key, value, call)


class RefusesAnEmptyBatch(TextbookAttention):
    def supports(self, request: Request) -> list[Reason]:
        empty = [Reason("batch", "an empty batch", "one item or more")] if request.batch == 0 else []
        return super().supports(request) + empty


class TrainsWithAnotherScale(TextbookAttention):
    def scale(self, call: Call) -> float:
        return super().scale(call) * (1.1 if self.training else 1.0)


class DropoutFollowsTheMode(TextbookAttention):
    """Dropout in train mode only, although dropout_p was given."""

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return torch.dropout(weights, p, self.training)


class DropoutIsNotRescaled(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return super().dropped(weights, p) * (1 - p)


class OneDropoutMaskForAllHeads(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return weights * torch.dropout(torch.ones_like(weights[:, :1]), p, True) if p else weights


class DropoutIsNotSeeded(TextbookAttention):
    def dropped(self, weights: Tensor, p: float) -> Tensor:
        if not p:
            return weights
        generator = torch.Generator()
        generator.seed()
        kept = torch.rand(weights.shape, generator=generator).to(weights.device) >= p
        return weights * kept / (1 - p)


class WeightsAfterDropout(TextbookAttention):
    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return used


@before_the_gate(lambda named: named.pop("softcap", None))
class SwallowsSoftcap(TextbookAttention):
    """Declares no softcap and takes it anyway: the argument is dropped without a word."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is not part of this variant")


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


MUTANTS = (
    Mutant(HalfPrecisionScores, "scores_may_exceed_half_precision", "scores in float16 overflow"),
    Mutant(HalfPrecisionSums, "sums_are_taken_in_float32", "a normaliser past float16's range"),
    Mutant(KeepsAFloat32Buffer, "autocast_agrees", "expected Float but found BFloat16"),
    Mutant(BiasMustHaveTheQuerysDtype, "bias_and_sinks_may_have_another_dtype", "a float32 mask beside bfloat16"),
    Mutant(HidesATensor, "copies_agree", "a tensor outside the state_dict"),
    Mutant(ForgetsAParameter, "gradients_reach_every_parameter", "a parameter that nothing uses"),
    Mutant(DropoutIsNotSeeded, "recomputation_gives_the_same_gradients", "recomputation draws a new mask"),
    Mutant(AlwaysFloat32, "shapes_and_dtypes", "out is float32 whatever query is"),
    Mutant(ReturnsWhatWasNotAsked, "shapes_and_dtypes", "an empty placeholder for weights"),
    Mutant(ReadsQueryAsContiguous, "strides_do_not_matter", "a kernel ignores query's strides"),
    Mutant(ReadsValueAsContiguous, "strides_do_not_matter", "[B, L, H, D] memory is read as [B, H, L, D]"),
    Mutant(ScalesTheQueryInPlace, "inputs_are_not_modified", "query *= scale"),
    Mutant(ReturnsTheValueItself, "outputs_own_their_memory", "a shortcut returns a view of value"),
    Mutant(RefusesAnEmptyBatch, "empty_sizes", "batch 0 is refused"),
    Mutant(TrainsWithAnotherScale, "modes_agree", "train and eval take two paths"),
    Mutant(DropoutFollowsTheMode, "dropout_is_seeded", "dropout_p is ignored in eval mode"),
    Mutant(DropoutIsNotRescaled, "dropout_drops_that_share", "kept weights are not divided by 1 - p"),
    Mutant(OneDropoutMaskForAllHeads, "dropout_masks_are_independent", "a mask [B, 1, Lq, Lk]"),
    Mutant(DropoutIsNotSeeded, "dropout_is_seeded", "a generator of its own"),
    Mutant(WeightsAfterDropout, "weights_of_a_row_sum_to_one", "weights are returned after dropout"),
    Mutant(SwallowsSoftcap, "refuses_what_it_does_not_declare", "an undeclared argument is swallowed"),
)
