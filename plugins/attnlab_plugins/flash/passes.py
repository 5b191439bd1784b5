"""The forward and the backward of a call, kernel by kernel. Needs torch and triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.engines import run_kernel
from attnlab_plugins.flash.kernels.bias_gradient import bias_gradient_kernel
from attnlab_plugins.flash.kernels.forward import forward_kernel
from attnlab_plugins.flash.kernels.gradients import delta_kernel
from attnlab_plugins.flash.kernels.key_gradient import key_gradient_kernel
from attnlab_plugins.flash.kernels.query_gradient import query_gradient_kernel
from attnlab_plugins.flash.launch import SMALL, Problem, common, how, hull_of, spans_of, tiles_for


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """`out [B, Hq, Lq, Dv]` in query's dtype and `lse [B, Hq, Lq]` in float32, both contiguous."""
    query, key, value, sinks = problem.query, problem.key, problem.value, problem.sinks
    batch, heads, lq, _ = query.shape
    out = torch.empty(batch, heads, lq, value.shape[3], dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, heads, lq, dtype=torch.float32, device=query.device)
    tiles = tiles_for("forward", problem)
    run_kernel(
        forward_kernel,
        (triton.cdiv(lq, tiles.rows) * batch * heads,),
        tiles,
        query.device,
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        query_strides=query.stride(),
        key_strides=key.stride(),
        value_strides=value.stride(),
        out_strides=out.stride(),
        sinks=None if sinks is None else sinks.contiguous(),
        how=how(problem, tiles, key.shape[2] % tiles.columns == 0, query, key, value),
        **common(problem, hull_of(problem), spans_of(problem, tiles, True)),
    )
    return out, lse


class Gradients(NamedTuple):
    """Of query, key, value, bias and sinks; the last two None where not requested."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def backward(
    problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, of_bias: bool, of_sinks: bool
) -> Gradients:
    """The gradients of `sum(out * grad_out) + sum(lse * grad_lse)`; `out` and `lse` are `forward`'s."""
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    batch, heads, lq, _ = query.shape
    lk = key.shape[2]
    delta = _delta(problem, out, lse, grad_out, grad_lse)
    per_query, per_key = (bias is not None and bias.shape[axis] > 1 for axis in (2, 3))
    bias_rows = lse.new_empty(batch, heads, lq) if of_bias and not per_key else None
    bias_columns = lse.new_empty(batch, heads, lk) if of_bias and per_key and not per_query else None
    hull = hull_of(problem)
    inputs: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "grad_out": grad_out,
        "lse": lse,
        "delta": delta,
        "query_strides": query.stride(),
        "key_strides": key.stride(),
        "value_strides": value.stride(),
        "grad_out_strides": grad_out.stride(),
    }
    read = (query, key, value, grad_out)

    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tiles = tiles_for("query_gradient", problem)
    run_kernel(
        query_gradient_kernel,
        (triton.cdiv(lq, tiles.rows) * batch * heads,),
        tiles,
        query.device,
        grad_query=grad_query,
        grad_query_strides=grad_query.stride(),
        bias_rows=bias_rows,
        signed_scale=float(problem.scale),
        how=how(problem, tiles, lk % tiles.columns == 0, *read),
        **inputs,
        **common(problem, hull, spans_of(problem, tiles, True)),
    )

    grad_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    tiles = tiles_for("key_gradient", problem)
    run_kernel(
        key_gradient_kernel,
        (triton.cdiv(lk, tiles.columns) * batch * key.shape[1],),
        tiles,
        query.device,
        grad_key=grad_key,
        grad_value=grad_value,
        grad_key_strides=grad_key.stride(),
        grad_value_strides=grad_value.stride(),
        bias_columns=bias_columns,
        signed_scale=float(problem.scale),
        how=how(problem, tiles, lq % tiles.rows == 0, *read),
        **inputs,
        **common(problem, hull, spans_of(problem, tiles, False)),
    )

    grad_bias = None
    if bias is not None and of_bias:
        if bias_rows is not None:
            grad_bias = bias_rows[..., None].sum_to_size(bias.shape).to(bias.dtype)  # [B, Hq, Lq, 1]
        elif bias_columns is not None:
            grad_bias = bias_columns[:, :, None].sum_to_size(bias.shape).to(bias.dtype)  # [B, Hq, 1, Lk]
        else:
            grad_bias = _bias_gradient(problem, bias, inputs, read)
    grad_sinks = _sinks_gradient(problem.sinks, lse, delta) if problem.sinks is not None and of_sinks else None
    return Gradients(grad_query, grad_key, grad_value, grad_bias, grad_sinks)


def _delta(problem: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """`[B, Hq, Lq]`, see `kernels.gradients`."""
    batch, heads, lq = lse.shape
    delta = torch.empty_like(lse)
    run_kernel(
        delta_kernel,
        (triton.cdiv(lq, SMALL.rows) * batch * heads,),
        SMALL,
        lse.device,
        out=out,
        grad_out=grad_out,
        grad_lse=grad_lse,
        delta=delta,
        out_strides=out.stride(),
        grad_strides=grad_out.stride(),
        grad_lse_strides=None if grad_lse is None else grad_lse.stride(),
        heads=heads,
        Lq=lq,
        how=how(problem, SMALL, False, out, grad_out),
    )
    return delta


def _bias_gradient(problem: Problem, bias: Tensor, inputs: dict[str, Any], read: tuple[Tensor, ...]) -> Tensor:
    lq, lk = problem.query.shape[2], problem.key.shape[2]
    gradient = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    tiles = tiles_for("bias_gradient", problem)
    run_kernel(
        bias_gradient_kernel,
        (triton.cdiv(lk, tiles.columns) * triton.cdiv(lq, tiles.rows) * bias.shape[0] * bias.shape[1],),
        tiles,
        problem.query.device,
        grad_bias=gradient,
        items=problem.query.shape[0],
        how=how(problem, tiles, False, *read),
        **inputs,
        **common(problem, None, None),
    )
    return gradient


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """`[Hq]`: a sink takes the weight exp(sink - lse) of each row that sees something, and its value is 0."""
    alive = lse > -torch.inf
    weight = torch.exp(sinks.float()[None, :, None] - torch.where(alive, lse, torch.inf))  # [B, Hq, Lq]
    return -(weight * torch.where(alive, delta, 0.0)).sum((0, 2)).to(sinks.dtype)
