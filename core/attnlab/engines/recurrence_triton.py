"""Fast-weight recurrences by Triton kernels: what they are given, forward and backward. Needs torch, and triton when called.

Nothing here reads the value of a tensor. Backward keeps the inputs and the last state, and walks the tokens again.

Shapes: query `[B, H, G, L, D]` or None, key `[B, H, L, D]`, value `[B, H, L, E]`, memory `[B, H, D, E]`, log_decay `[B, H, L]` or None;
float32, bfloat16 or float16, of any strides, D and E at most `WIDEST`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlab.engines.decays import FADED
from attnlab.engines.heads import in_own_precision
from attnlab.engines.triton_launch import Configuration, is_interpreted, run_kernel

WIDEST = 256
_REGISTERS = 255  # a thread may have; ptxas spills a few of them for a smaller number where it is not told


class Gradients(NamedTuple):
    """Of the inputs of `forward`, in their dtypes."""

    memory: Tensor
    query: Tensor | None
    key: Tensor
    value: Tensor
    log_decay: Tensor | None


@in_own_precision
def forward(
    memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, log_decay: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """`(out [B, H, G, L, E], S_L [B, H, D, E])` in float32: `q_t^T S_t` of `S_t = e^{g_t} S_{t-1} + k_t v_t^T`, S_0 being memory."""
    out = None if query is None else _made(*query.shape[:4], value.shape[3], like=value)
    last = _made(*memory.shape, like=memory)
    _forward_walk(memory, query, key, value, _totals(log_decay), out, last)
    return out, last


@in_own_precision
def backward(
    grad_out: Tensor | None,
    grad_last: Tensor | None,
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    last: Tensor,
) -> Gradients:
    """Gradients for those of `forward`'s results, None for zeros; `last` is its second. The same bits each time.

    With A_t the gradient of S_t, `dg_t = <A_t, e^{g_t} S_{t-1}> = <A_t, S_t> - k_t . dk_t`, and `<A_t, S_t> = dg_{t+1} + q_t . dq_t`,
    as `A_t = e^{g_{t+1}} A_{t+1} + q_t dout_t^T`: so dg_t is `<dS_L, S_L>` and the sum of `q_s . dq_s - k_s . dk_s` over `s >= t`.
    Its error is a few float32 roundings of the terms of that sum, even where they cancel, which under strong decays they do.
    """
    totals = _totals(log_decay)
    asked = query if grad_out is not None else None
    of_query = None if query is None else _made(*query.shape, like=query)
    of_key, of_value = _made(*key.shape, like=key), _made(*value.shape, like=value)
    of_memory = _made(*memory.shape, like=memory)
    if of_query is not None and grad_out is not None:
        _forward_walk(memory.transpose(2, 3), grad_out, value, key, totals, of_query, None)
    elif of_query is not None:
        of_query.zero_()
    _backward_walk(grad_last, key, asked, grad_out, totals, of_value, of_memory)
    turned = None if grad_last is None else grad_last.transpose(2, 3)
    _backward_walk(turned, value, grad_out, asked, totals, of_key, None)
    of_decay = None
    if log_decay is not None:
        terms = -(key * of_key).sum(-1, dtype=torch.float64)  # [B, H, L]
        if asked is not None and of_query is not None:
            terms = terms + (asked * of_query).sum((2, 4), dtype=torch.float64)
        of_decay = terms.flip(2).cumsum(2).flip(2)
        if grad_last is not None:
            of_decay = of_decay + (grad_last * last).sum((2, 3), dtype=torch.float64)[..., None]
        of_decay = of_decay.masked_fill(log_decay < FADED, 0).to(log_decay.dtype)
    return Gradients(
        of_memory.to(memory.dtype),
        None if query is None or of_query is None else of_query.to(query.dtype),
        of_key.to(key.dtype),
        of_value.to(value.dtype),
        of_decay,
    )


def _forward_walk(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    totals: Tensor | None,
    out: Tensor | None,
    last: Tensor | None,
) -> None:
    from attnlab.engines.recurrence_kernels import forward_kernel

    batch, heads, length, rows = key.shape
    tiles, block_d = _tiles(rows, value.shape[3])
    run_kernel(
        forward_kernel,
        (batch * heads * -(-value.shape[3] // tiles.columns),),
        tiles,
        key.device,
        query=query,
        key=key,
        value=value,
        memory=memory,
        totals=totals,
        out=out,
        last=last,
        query_strides=(0,) * 5 if query is None else query.stride(),
        key_strides=key.stride(),
        value_strides=value.stride(),
        memory_strides=memory.stride(),
        heads=heads,
        groups=0 if query is None else query.shape[2],
        length=length,
        rows=rows,
        columns=value.shape[3],
        CHUNK=tiles.rows,
        BLOCK_D=block_d,
        BLOCK_E=tiles.columns,
        maxnreg=_REGISTERS,
    )


def _backward_walk(
    memory: Tensor | None,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    totals: Tensor | None,
    out: Tensor,
    first: Tensor | None,
) -> None:
    """`backward_kernel`, for out `[B, H, L, E]` and first `[B, H, D, E]`; key and value None where no query asked."""
    from attnlab.engines.recurrence_kernels import backward_kernel

    batch, heads, length, rows = query.shape
    columns = out.shape[3]
    tiles, block_d = _tiles(rows, columns)
    run_kernel(
        backward_kernel,
        (batch * heads * -(-columns // tiles.columns),),
        tiles,
        query.device,
        query=query,
        key=key,
        value=value,
        memory=memory,
        totals=totals,
        out=out,
        first=first,
        query_strides=query.stride(),
        key_strides=(0,) * 5 if key is None else key.stride(),
        value_strides=(0,) * 5 if value is None else value.stride(),
        memory_strides=(0,) * 4 if memory is None else memory.stride(),
        heads=heads,
        groups=0 if key is None else key.shape[2],
        length=length,
        rows=rows,
        columns=columns,
        CHUNK=tiles.rows,
        BLOCK_D=block_d,
        BLOCK_E=tiles.columns,
        maxnreg=_REGISTERS,
    )


def _made(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _totals(log_decay: Tensor | None) -> Tensor | None:
    """T and what float32 rounds off it, `[B H, 2, chunks C]`, of sums in float64; tokens that fill the last chunk up do not fade."""
    if log_decay is None:
        return None
    chunk = _chunk()
    g = log_decay.flatten(0, 1).clamp(min=FADED).double()  # [B H, L]
    g = pad(g, (0, -g.shape[1] % chunk))
    total = g.reshape(g.shape[0], g.shape[1] // chunk, chunk).cumsum(2).flatten(1)
    high = total.float()
    return torch.stack((high, (total - high).float()), 1)


def _chunk() -> int:
    from attnlab.engines.recurrence_kernels import forward_kernel

    return 16 if is_interpreted(forward_kernel) else 32


def _tiles(rows: int, columns: int) -> tuple[Configuration, int]:
    """Tokens of a chunk, columns of the memory a program holds, warps and stages; and the memory's rows, padded.

    Few columns, as programs are few: one a head and block. The numbers come from compiling alone: nothing spills, but for a few
    registers at widths beyond 128 that 16 does not divide, whose addresses take more of them.
    """
    block_d = _padded(rows)
    block_e = min(32 if rows in (64, 128) else 16, _padded(columns))
    return Configuration(_chunk(), block_e, 4 if block_d <= 32 else 8, 1), block_d


def _padded(width: int) -> int:
    """The power of two that holds it, 16 or more, as products take no fewer."""
    return max(16, 1 << (width - 1).bit_length())
