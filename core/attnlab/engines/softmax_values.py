"""`softmax(s) v` of whole rows with a graph, in one large tensor less than torch takes: the gradient of the scores reuses the memory of the weights' gradient.

Needs torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.engines.heads import in_own_precision
from attnlab.engines.triton_launch import are_plain


def softmax_values(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`(softmax(scores) @ value, softmax(scores))` of `scores [B, H, tq, tk]` and `value [B, H, tk, Dv]` of one dtype."""
    if not are_plain(scores, value) or not torch.is_grad_enabled():
        weights = torch.softmax(scores, -1)
        return weights @ value, weights
    out, weights = _SoftmaxValues.apply(scores, value)  # type: ignore[no-untyped-call]
    return out, weights


class _SoftmaxValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(scores, -1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, value)
        return weights @ value, weights

    @staticmethod
    def backward(ctx: Any, of_out: Tensor | None, of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, value = ctx.saved_tensors
        of_scores = of_value = None
        if ctx.needs_input_grad[0]:
            of_scores = _of_scores(of_out, of_weights, weights, value)
        if ctx.needs_input_grad[1] and of_out is not None:
            of_value = _product(weights.transpose(-1, -2), of_out)
        return of_scores, of_value


@in_own_precision
def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def _of_scores(of_out: Tensor | None, of_weights: Tensor | None, weights: Tensor, value: Tensor) -> Tensor | None:
    if of_out is None and of_weights is None:
        return None
    if of_out is None:
        inner = of_weights
    else:
        inner = _product(of_out, value.transpose(-1, -2))
        inner = inner if of_weights is None else inner + of_weights
    assert inner is not None
    if torch.is_grad_enabled():  # second-order gradients
        return weights * (inner - (inner * weights).sum(-1, keepdim=True))
    # torch writes to `grad_input` as if it were contiguous; of_weights alone is the caller's.
    mine = of_out is not None and are_plain(inner, weights) and inner.is_contiguous()
    place = {"grad_input": inner} if mine else {}
    of_scores: Tensor = torch._softmax_backward_data(inner, weights, -1, weights.dtype, **place)
    return of_scores
