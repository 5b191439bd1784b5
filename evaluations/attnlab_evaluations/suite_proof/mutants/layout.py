"""Mutants that the checks in `checks/layout.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Reason, Request
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDot
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookMaps
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _Returned

Role = Literal["query", "key"]


class ScalesKeysInPlace(TextbookDot):
    def project_key(self, key: Tensor) -> Tensor:
        with torch.no_grad():
            key.mul_(2)
            return key.div_(2)


class DoublesTheDirection(_Backward):
    """grad_out is scaled in place and left so."""

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        with torch.no_grad():
            d_out.mul_(1.0)
        return super().delta(d_out, d_lse, out)


class AlwaysFloat32(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer._replace(out=answer.out.to(torch.float32))


class ReturnsWhatWasNotAsked(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer if answer.weights is not None else answer._replace(weights=query.new_zeros(1))


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


class ReturnsItsBuffer(TextbookAttention):
    """out is a static buffer, as a captured graph has it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.buffer: dict[Any, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if torch.is_grad_enabled():
            return answer
        place = (tuple(answer.out.shape), answer.out.dtype, torch.is_inference_mode_enabled())
        return answer._replace(out=self.buffer.setdefault(place, torch.empty_like(answer.out)).copy_(answer.out))


class InvertsTheMaskInPlace(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if visibility is not None and visibility.allowed is not None:
            visibility.allowed.logical_not_()
            visibility.allowed.logical_not_()
        return super().attend(query, key, value, call)


class MasksTheBiasInPlace(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.bias is not None and call.visibility is None:
            call.bias.data.clamp_(min=-1.0)
        return super().attend(query, key, value, call)


class _OnItself(torch.autograd.Function):
    """exp whose backward writes its product into what was saved."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(query)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (query,) = ctx.saved_tensors
        query.data.mul_(1.5)
        return None, grad


class PopsItsGates(TextbookDelta):
    """Gates are taken out of the caller's mapping."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.gates is not None and call.visibility is None:
            gates: Any = call.gates
            call.gates = {"beta": gates.pop("beta")}
        return super().attend(query, key, value, call)


class BackwardScalesTheQueryInPlace(TextbookAttention):
    """The saved query is scaled in place, and it is the caller's."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.first_input = query
        return super().attend(query, key, value, call)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        result: Tensor = _OnItself.apply(self.first_input, super().scores(q, k, call))  # type: ignore[no-untyped-call]
        return result


class WritesIntoWhatItMaps(TextbookMaps):
    """relu_ on the keys that the state, or the caller, still holds."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        if role == "key" and not torch.is_grad_enabled():
            x.add_(1).sub_(1)
        return super().feature_map(x, role=role, positions=positions)


class WeightsAreAMeanOverHeads(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights.mean(1)


class WeightsShareOneBuffer(_Returned):
    """Weights of a size are written into one buffer, call after call."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.buffer: dict[Any, Tensor] = {}

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        if weights.requires_grad:
            return weights
        key = (tuple(weights.shape), weights.dtype)
        return self.buffer.setdefault(key, torch.empty_like(weights)).copy_(weights)


class LseHasFourAxes(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse.unsqueeze(-1)


class LseIsRoundedToTheQuery(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer if answer.lse is None else answer._replace(lse=answer.lse.to(query.dtype))


class ViewsItsInput(TextbookDot):
    """`view` needs adjacent memory."""

    def project_query(self, query: Tensor) -> Tensor:
        return query.view(-1, query.shape[2], query.shape[3]).view(query.shape)


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


def _as_contiguous(x: Tensor) -> Tensor:
    """What lies behind x read with the strides that a contiguous tensor of its shape would have."""
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() or room < x.numel():
        return x
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


class ReadsTheBiasAsContiguous(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.bias is not None:
            call.bias = _as_contiguous(call.bias)
        return super().attend(query, key, value, call)


class ReadsSinksAsContiguous(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.sinks is not None:
            call.sinks = _as_contiguous(call.sinks)
        return super().attend(query, key, value, call)


class ReadsOverlappingRowsByTheirWidth(TextbookAttention):
    """The stride between tokens is taken to be the width."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        width = key.shape[3]
        if key.stride(3) == 1 and 0 < key.stride(2) < width and key.shape[2] > 1:
            first = key[:, :, :1]
            key = torch.cat([first, key[:, :, :: 2 if width > 1 else 1], first.expand(key.shape)], 2)[
                :, :, : key.shape[2]
            ]
        return super().attend(query, key, value, call)


class ReadsGatesAsContiguous(TextbookDelta):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        call.gates = {n: _as_contiguous(g) for n, g in (call.gates or {}).items()}
        return super().attend(query, key, value, call)


class ViewsWhatMayBeExpanded(TextbookAttention):
    """view(B * H, L, D) fails on tensors whose batch and heads are no one axis."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        value.view(-1, value.shape[2], value.shape[3])
        return super().attend(query, key, value, call)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ScalesKeysInPlace, "inputs_are_not_modified", "key *= scale"),
    Mutant(DoublesTheDirection, "inputs_are_not_modified", "grad_out is written to"),
    Mutant(AlwaysFloat32, "shapes_and_dtypes", "out is float32 whatever query is"),
    Mutant(ReturnsWhatWasNotAsked, "shapes_and_dtypes", "an empty placeholder for weights"),
    Mutant(ScalesTheQueryInPlace, "inputs_are_not_modified", "query *= scale"),
    Mutant(ReturnsTheValueItself, "outputs_own_their_memory", "a shortcut returns a view of value"),
    Mutant(RefusesAnEmptyBatch, "empty_sizes", "batch 0 is refused"),
    Mutant(ReturnsItsBuffer, "outputs_own_their_memory", "a static output buffer"),
    Mutant(InvertsTheMaskInPlace, "inputs_are_not_modified", "the mask is inverted in place"),
    Mutant(MasksTheBiasInPlace, "inputs_are_not_modified", "the bias is clamped in place"),
    Mutant(BackwardScalesTheQueryInPlace, "inputs_are_not_modified", "backward writes into what it saved"),
    Mutant(PopsItsGates, "inputs_are_not_modified", "gates.pop() on the caller's mapping"),
    Mutant(WritesIntoWhatItMaps, "inputs_are_not_modified", "an in-place activation"),
    Mutant(WeightsAreAMeanOverHeads, "shapes_and_dtypes", "weights [B, Lq, Lk]"),
    Mutant(WeightsShareOneBuffer, "outputs_own_their_memory", "a static buffer for weights"),
    Mutant(LseHasFourAxes, "shapes_and_dtypes", "lse [B, H, Lq, 1]"),
    Mutant(LseIsRoundedToTheQuery, "shapes_and_dtypes", "lse in half precision"),
    Mutant(ViewsItsInput, "strides_do_not_matter", "view() needs adjacent memory"),
    Mutant(ReadsQueryAsContiguous, "strides_do_not_matter", "a kernel ignores query's strides"),
    Mutant(ReadsValueAsContiguous, "strides_do_not_matter", "[B, L, H, D] memory is read as [B, H, L, D]"),
    Mutant(ReadsTheBiasAsContiguous, "strides_do_not_matter", "a transposed bias is read as contiguous"),
    Mutant(ReadsSinksAsContiguous, "strides_do_not_matter", "strided sinks are read as contiguous"),
    Mutant(ReadsOverlappingRowsByTheirWidth, "strides_do_not_matter", "overlapping tokens"),
    Mutant(ReadsGatesAsContiguous, "strides_do_not_matter", "gates of [B, L, H] memory"),
    Mutant(ViewsWhatMayBeExpanded, "strides_do_not_matter", "view() of an expanded tensor"),
)
