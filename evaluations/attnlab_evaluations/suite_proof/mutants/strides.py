"""Mutants of `checks/strides.py`: operands that are read as if they were contiguous. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDot


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


MUTANTS = (
    Mutant(ViewsItsInput, "strides_do_not_matter", "view() needs adjacent memory"),
    Mutant(ReadsQueryAsContiguous, "strides_do_not_matter", "a kernel ignores query's strides"),
    Mutant(ReadsValueAsContiguous, "strides_do_not_matter", "[B, L, H, D] memory is read as [B, H, L, D]"),
    Mutant(ReadsTheBiasAsContiguous, "strides_do_not_matter", "a transposed bias is read as contiguous"),
    Mutant(ReadsSinksAsContiguous, "strides_do_not_matter", "strided sinks are read as contiguous"),
    Mutant(ReadsOverlappingRowsByTheirWidth, "strides_do_not_matter", "overlapping tokens"),
    Mutant(ReadsGatesAsContiguous, "strides_do_not_matter", "gates of [B, L, H] memory"),
    Mutant(ViewsWhatMayBeExpanded, "strides_do_not_matter", "view() of an expanded tensor"),
)
