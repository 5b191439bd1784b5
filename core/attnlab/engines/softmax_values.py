"""`softmax(s) v` of whole rows with a graph, in as few large tensors as that takes. Needs torch.

What torch records by itself makes four of the size of the scores: scores, weights, and a gradient of each. Here gradients of the
scores take the place of those of the weights, and weights that of scores which nobody else needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.engines.heads import in_own_precision
from attnlab.engines.triton_launch import are_plain


def softmax_values(scores: Tensor, value: Tensor, *, owned: bool) -> tuple[Tensor, Tensor]:
    """`(softmax(scores) @ value, softmax(scores))` of `scores [B, H, tq, tk]` and `value [B, H, tk, Dv]` of one dtype.

    owned: nobody else holds the scores, nor a graph their values, so that they may be overwritten.
    """
    if not are_plain(scores, value) or not torch.is_grad_enabled():
        weights = torch.softmax(scores, -1)
        return weights @ value, weights
    out, weights = _SoftmaxValues.apply(scores, value, owned and not scores._is_view())  # type: ignore[no-untyped-call]
    return out, weights


class _SoftmaxValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, owned: bool) -> tuple[Tensor, Tensor]:
        if owned:
            weights = torch._softmax(scores, -1, False, out=scores)
            ctx.mark_dirty(scores)
        else:
            weights = torch.softmax(scores, -1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, value)
        return weights @ value, weights

    @staticmethod
    def backward(ctx: Any, of_out: Tensor | None, of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        of_scores, of_value = _gradients(of_out, of_weights, *ctx.saved_tensors)
        return of_scores, of_value, None


@in_own_precision
def _gradients(
    of_out: Tensor | None, of_weights: Tensor | None, weights: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    if of_out is None and of_weights is None:
        return None, None
    inner, of_value = of_weights, None
    if of_out is not None:
        of_value = weights.transpose(-1, -2) @ of_out
        inner = of_out @ value.transpose(-1, -2)
        inner = inner if of_weights is None else inner + of_weights
    assert inner is not None
    if torch.is_grad_enabled():  # gradients of these gradients are wanted
        return weights * (inner - (inner * weights).sum(-1, keepdim=True)), of_value
    place = {} if of_out is None else {"grad_input": inner}  # of_weights is the caller's
    of_scores: Tensor = torch._softmax_backward_data(inner, weights, -1, weights.dtype, **place)
    return of_scores, of_value
