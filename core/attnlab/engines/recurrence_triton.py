"""Fast-weight recurrences by Triton kernels: their arguments, forward and backward. Needs torch, and triton when called.

Nothing here reads the value of a tensor. Backward keeps the inputs and what corrections wrote, and walks the tokens again.

Shapes: query `[B, H, G, L, D]` or None, key `[B, H, L, D]`, value `[B, H, L, E]`, memory `[B, H, D, E]`, beta and log_decay `[B, H, L]`
or None; float32, bfloat16 or float16, of any strides, D and E at most `WIDEST`.
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


class Results(NamedTuple):
    """Of `forward`, in float32: out `[B, H, G, L, E]`, last `[B, H, D, E]`; updates, u `[B, H, L, E]` where writing corrects."""

    out: Tensor | None
    last: Tensor
    updates: Tensor | None


class Gradients(NamedTuple):
    """Of the inputs of `forward`, in their dtypes."""

    memory: Tensor
    query: Tensor | None
    key: Tensor
    value: Tensor
    beta: Tensor | None
    log_decay: Tensor | None


class _Fixed(NamedTuple):
    """What the walks know of all tokens before they begin, as `recurrence_kernels` says: T, and beta and R where writing corrects."""

    totals: Tensor | None
    rates: Tensor | None = None
    solved: Tensor | None = None


@in_own_precision
def forward(
    memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor | None, log_decay: Tensor | None
) -> Results:
    """out, `q_t^T S_t` of `S_t = e^{g_t} S_{t-1} + k_t u_t^T`, S_0 being memory; last is S_L.

    u_t is `beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)`, or v_t where beta is None.
    """
    out = None if query is None else _made(*query.shape[:4], value.shape[3], like=value)
    last = _made(*memory.shape, like=memory)
    updates = None if beta is None else _made(*value.shape, like=value)
    _forward_walk(memory, query, key, value, _fixed(key, beta, log_decay), out, last, updates)
    return Results(out, last, updates)


@in_own_precision
def backward(
    grad_out: Tensor | None,
    grad_last: Tensor | None,
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    updates: Tensor | None,
) -> Gradients:
    """Gradients for the first two of `forward`'s results, None for zeros; updates are its third. The same bits each time.

    A_t is the gradient of S_t, and `d_t = A_t^T k_t` that of u_t. At t the memory is read by q_t, and where writing corrects by
    `-beta_t k_t`, before the token's own `k_t u_t^T` is in it. With x_t the gradient of k_t through later readers, and `-beta_t k_t`
    having the gradient p_t and q_t `p'_t + (dout_t . u_t) k_t`:

        dv_t = beta_t d_t,    dbeta_t = d_t . v_t - k_t . p_t,    dk_t = x_t + (dout_t . u_t) q_t - beta_t p_t

        dg_t = <dS_0, S_0> + sum over s < t of (k_s . x_s - q_s . p'_s + beta_s k_s . p_s)

    as what fades at t is all that was written before, but for what was read before. Strong decays make each of these terms small, so
    that little is left to cancel.
    """
    fixed = _fixed(key, beta, log_decay)
    known = _Fixed(fixed.totals)  # of walks that are told u
    queries = query if grad_out is not None else None
    written = value if updates is None else updates
    of_update, of_memory = _made(*value.shape, like=value), _made(*memory.shape, like=memory)
    _backward_walk(grad_last, key, queries, grad_out, fixed, of_update, of_memory)  # d, or dv where u is v
    readers, grads = queries, grad_out
    if beta is not None:
        rates = beta[..., None].float()
        readers, grads = _joined(queries, -rates * key), _joined(grad_out, of_update)
    of_key = _made(*key.shape, like=key)
    turned = None if grad_last is None else grad_last.transpose(2, 3)
    _backward_walk(turned, written, grads, readers, known, of_key, None, own=False)
    # [B, H, L]: what begins to fade after t, less what need not fade any more
    fading = None if log_decay is None else _inner(key, of_key)
    of_query, of_value, of_beta, of_decay = None, of_update, None, None
    if readers is not None and grads is not None:
        of_readers = _made(*readers.shape, like=key)
        _forward_walk(memory.transpose(2, 3), grads, written, key, known, of_readers, None, own=False)
        if fading is not None:
            fading = fading - _inner(readers, of_readers).sum(2)
        if queries is not None and grad_out is not None:
            own = (grad_out * written.float()[:, :, None]).sum(-1, keepdim=True)  # [B, H, G, L, 1]
            of_query = of_readers[:, :, : queries.shape[2]] + own * key[:, :, None]
            of_key = of_key + (own * queries).sum(2)
        if beta is not None:
            of_correction = of_readers[:, :, -1]
            of_beta = (_inner(of_update, value) - _inner(key, of_correction)).to(beta.dtype)
            of_key, of_value = of_key - rates * of_correction, rates * of_update
    if log_decay is not None and fading is not None:
        of_decay = fading.cumsum(2) - fading + _inner(memory, of_memory).sum(2)[..., None]
        of_decay = of_decay.masked_fill(log_decay < FADED, 0).to(log_decay.dtype)
    if of_query is None and query is not None:
        of_query = torch.zeros_like(query)
    return Gradients(
        of_memory.to(memory.dtype),
        None if query is None or of_query is None else of_query.to(query.dtype),
        of_key.to(key.dtype),
        of_value.to(value.dtype),
        of_beta,
        of_decay,
    )


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(-1, dtype=torch.float64)


def _joined(members: Tensor | None, one: Tensor) -> Tensor:
    """`[B, H, G + 1, L, *]`: one `[B, H, L, *]` as the last member of the group."""
    return one[:, :, None] if members is None else torch.cat((members, one[:, :, None]), 2)


def _forward_walk(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    fixed: _Fixed,
    out: Tensor | None,
    last: Tensor | None,
    updates: Tensor | None = None,
    own: bool = True,
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
        **fixed._asdict(),
        updates=updates,
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
        OWN=own,
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
    fixed: _Fixed,
    out: Tensor,
    first: Tensor | None,
    own: bool = True,
) -> None:
    """`backward_kernel`, for out `[B, H, L, E]` and first `[B, H, D, E]`; key and value None where nothing reads."""
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
        **fixed._asdict(),
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
        OWN=own,
        CHUNK=tiles.rows,
        BLOCK_D=block_d,
        BLOCK_E=tiles.columns,
        maxnreg=_REGISTERS,
    )


def _made(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _fixed(key: Tensor, beta: Tensor | None, log_decay: Tensor | None) -> _Fixed:
    from attnlab.engines.recurrence_kernels import solve_kernel

    totals = _totals(log_decay)
    if beta is None:
        return _Fixed(totals)
    batch, heads, length, rows = key.shape
    chunk, block_d = _chunk(), _padded(rows)
    chunks = -(-length // chunk)
    rates = pad(beta.flatten(0, 1).float(), (0, chunks * chunk - length)).contiguous()
    solved = _made(batch * heads, chunks, chunk, chunk, like=key)
    run_kernel(
        solve_kernel,
        (batch * heads * chunks,),
        Configuration(chunk, chunk, 1, 1),  # rows wait for each other, as warps would
        key.device,
        key=key,
        totals=totals,
        rates=rates,
        solved=solved,
        key_strides=key.stride(),
        heads=heads,
        length=length,
        rows=rows,
        CHUNK=chunk,
        BLOCK_D=block_d,
    )
    return _Fixed(totals, rates, solved)


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
