"""`chunked_recurrence` as one operator of a graph of torch.compile, which so serves every length. Needs torch.

The loop over chunks would be written out in the graph, once for each number of chunks. The operator runs what eager mode runs, Triton
kernels included; its backward computes the forward again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def call(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    corrects: bool,
) -> tuple[Tensor | None, Tensor]:
    """`chunked_recurrence` of these."""
    out, last = _forward(memory, query, key, value, beta, log_decay, corrects)
    return (None if query is None else out), last


@torch.library.custom_op(
    "attnlab::chunked_recurrence",
    mutates_args=(),
    schema="(Tensor memory, Tensor? query, Tensor key, Tensor value, Tensor? beta, Tensor? log_decay, bool corrects) -> (Tensor, Tensor)",
)
def _forward(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    from attnlab.engines.chunked_recurrence import chunked_recurrence

    out, last = chunked_recurrence(memory, query, key, value, beta=beta, log_decay=log_decay, corrects=corrects)
    # An operator's results are no views of its inputs.
    return (value.new_empty(0) if out is None else out.contiguous()), last.clone()


@_forward.register_fake
def _(memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = value.new_empty(0) if query is None else value.new_empty(*query.shape[:4], value.shape[3])
    return out, torch.empty_like(memory, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "attnlab::chunked_recurrence_backward",
    mutates_args=(),
    schema="(Tensor? of_out, Tensor of_last, Tensor memory, Tensor? query, Tensor key, Tensor value, Tensor? beta, Tensor? log_decay,"
    " bool corrects) -> Tensor[]",
)
def _backward(
    of_out: Tensor | None,
    of_last: Tensor,
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    corrects: bool,
) -> list[Tensor]:
    from attnlab.engines.chunked_recurrence import chunked_recurrence

    inputs = (memory, query, key, value, beta, log_decay)
    there = [x for x in inputs if x is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        m, q, k, v, b, g = (None if x is None else next(left) for x in inputs)
        assert m is not None
        assert k is not None
        assert v is not None
        out, last = chunked_recurrence(m, q, k, v, beta=b, log_decay=g, corrects=corrects)
        return (last,) if out is None else (last, out)

    # Below autograd, as an operator is, this is what differentiates.
    _, pull = torch.func.vjp(run, *there)  # type: ignore[misc] # two results without has_aux
    gradients = pull((of_last,) if of_out is None else (of_last, of_out))
    return [x.contiguous().clone() for x in gradients]


@_backward.register_fake
def _(of_out: Tensor | None, of_last: Tensor, *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs if isinstance(x, Tensor)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.corrects = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, of_out: Tensor, of_last: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    made = iter(_backward(None if tensors[1] is None else of_out, of_last, *tensors, ctx.corrects))
    return (*(None if x is None else next(made) for x in tensors), None)


_forward.register_autograd(_gradients, setup_context=_keep)
