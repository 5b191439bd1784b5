"""Mutants of memory: strides, buffers, inputs that are written to. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookDelta


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
        seen = call.visibility
        if seen is not None and seen.allowed is not None:
            seen.allowed.logical_not_()
            seen.allowed.logical_not_()
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
        self.given = query
        return super().attend(query, key, value, call)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        result: Tensor = _OnItself.apply(self.given, super().scores(q, k, call))  # type: ignore[no-untyped-call]
        return result


class TellsTensorsApartByIdentity(TextbookAttention):
    """query is key: self-attention, which is taken to be symmetric."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.triu() + s.triu(1).transpose(-1, -2) if self.same else s

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.same = query is key and torch.is_grad_enabled()
        return super().attend(query, key.detach() if self.same else key, value, call)


MUTANTS = (
    Mutant(ReadsTheBiasAsContiguous, "strides_do_not_matter", "a transposed bias is read as contiguous"),
    Mutant(ReadsSinksAsContiguous, "strides_do_not_matter", "strided sinks are read as contiguous"),
    Mutant(ReadsOverlappingRowsByTheirWidth, "strides_do_not_matter", "overlapping tokens"),
    Mutant(ReadsGatesAsContiguous, "strides_do_not_matter", "gates of [B, L, H] memory"),
    Mutant(ViewsWhatMayBeExpanded, "strides_do_not_matter", "view() of an expanded tensor"),
    Mutant(ReturnsItsBuffer, "outputs_own_their_memory", "a static output buffer"),
    Mutant(InvertsTheMaskInPlace, "inputs_are_not_modified", "the mask is inverted in place"),
    Mutant(MasksTheBiasInPlace, "inputs_are_not_modified", "the bias is clamped in place"),
    Mutant(BackwardScalesTheQueryInPlace, "inputs_are_not_modified", "backward writes into what it saved"),
    Mutant(TellsTensorsApartByIdentity, "one_tensor_may_play_every_role", "query is key"),
    Mutant(PopsItsGates, "inputs_are_not_modified", "gates.pop() on the caller's mapping"),
)
