"""Variants that require something of a call, or give up a law: rows or heads that mix, gradients that are none. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import Attention, AttentionOutput, Call, Requirements
from attnlab.engines import in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import (
    dropped,
    each_head,
    hidden_scores,
    products,
    scale_of,
    softmax_rows,
    widened,
)
from attnlab_evaluations.suite_proof.correct.normalisers import PAIRWISE
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta

ROUNDS = 3


def _balanced(weights: Tensor, dim: int) -> Tensor:
    """`weights` divided by their sums along `dim`, where these are not 0."""
    total = weights.sum(dim, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def sinkhorn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Definition: softmax over keys, then sums over queries and over keys are made equal in turns."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query, key, visible=visible, bias=bias, scale=scale)
    w, _ = softmax_rows(s, visible)
    for _ in range(ROUNDS):
        columns = w.sum(-2, keepdim=True)
        w = w / torch.where(columns > 0, columns, 1)
        rows = w.sum(-1, keepdim=True)
        w = w / torch.where(rows > 0, rows, 1)
    return {"out": w @ value, "weights": w}


class SinkhornAttention(Attention):
    """Weights whose rows and columns are balanced in turns, so that a row depends on every query. Sander et al. 2022, "Sinkformers"."""

    name = "sinkhorn"
    formula = "sinkhorn"
    definition = staticmethod(sinkhorn)
    capabilities = replace(PAIRWISE, rows_independent=False, dropout=False, isolates_nonfinite=False)

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale_of(self, call), call)
        w = torch.softmax(s.masked_fill(~(s > -torch.inf).any(-1, keepdim=True), 0), -1).masked_fill(s == -torch.inf, 0)
        if call.visibility is not None and call.visibility.query_present is not None:  # a padded query balances nothing
            w = w * call.visibility.query_present[:, None, :, None]
        for _ in range(ROUNDS):
            w = _balanced(_balanced(w, -2), -1)
        return AttentionOutput((w @ v).to(query.dtype), w.to(query.dtype) if call.need_weights else None)


def damped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Definition: softmax, of whose gradient half passes."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    w, _ = softmax_rows(*products(query, key, visible=visible, bias=bias, scale=scale))
    w = (w + w.detach()) / 2
    return {"out": w @ value, "weights": w}


class DampedAttention(Attention):
    """softmax, of whose gradient half passes: the backward is no derivative of the forward, as that of a straight-through estimator."""

    name = "damped"
    formula = "damped"
    definition = staticmethod(damped)
    capabilities = replace(PAIRWISE, surrogate_gradient=True)

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale_of(self, call), call)
        sees = (s > -torch.inf).any(-1, keepdim=True)
        w = torch.softmax(s.masked_fill(~sees, 0), -1).masked_fill(~sees, 0)
        w = (w + w.detach()) / 2
        return AttentionOutput((dropped(w, call) @ v).to(query.dtype), w.to(query.dtype) if call.need_weights else None)


class CausalSquareAttention(TextbookAttention):
    """Dot-product attention that takes causal calls of equal lengths alone, multiples of 4 up to 64."""

    name = "causal_square"
    formula = "softmax_dot_product"
    requires = Requirements(causal=True, equal_lengths=True, length_multiple=4, max_length=64)


class FixedWindowAttention(TextbookAttention):
    """Dot-product attention that needs a window."""

    name = "always_windowed"
    requires = Requirements(window=True)


class ShortDelta(TextbookDelta):
    """The delta rule for 20 tokens at most."""

    name = "short_delta"

    def __init__(self, *, longest: int = 20, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {**self.options, "longest": longest}
        self.require(max_length=longest)


class RoundedAttention(TextbookAttention):
    """Dot-product attention whose weights are rounded to 1/64: it is no nearer to its formula than that."""

    formula = "softmax_dot_product"

    name = "rounded_output"
    capabilities = replace(
        PAIRWISE,
        exact=False,
        approximation=8.0,
        normalised=False,
        linear_in_value=False,
        backward=False,
        double_backward=False,
    )

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return (64 * weights).round() / 64, lse
