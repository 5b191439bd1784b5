"""The additive score `sum_d v_d tanh(q_d + k_d)` of a tile, without `[tq, tk, A]` and without a tanh for each of its elements.

With `u = exp(-2 q)` and `e = exp(2 k)`, made once for each row, `tanh(q + k) = 1 - 2 u / (u + e)`: an addition and a reciprocal
for each element. The derivative is `4 u e / (u + e)^2`, so that backward needs the same reciprocals again, and keeps nothing
but its inputs. Powers of e have a range: rows beyond `REACH` go by tanh itself. On the CPU torch does this by blocks, whose
reciprocals a batched product with `v u` sums; on CUDA Triton kernels do, see `additive_triton`. No GPU has run those.

Notation: tq, tk sides of the tile, A hidden size; g gradient of the scores; r = 1 / (u + e). Needs torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.engines.heads import accumulation_dtype, in_own_precision
from attnlab.engines.triton_launch import kernels_serve

# Elements of `[rows, A, tk]` that are worked on together: 1 MiB of float32, the second-level caches of two cores.
BLOCK_ELEMENTS = 1 << 18
# Squares of reciprocals down to exp(-4 REACH) must be normal numbers; float64 could go further and has no need.
REACH = 20.0
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@in_own_precision
def additive_projection(x: Tensor, weight: Tensor) -> Tensor:
    """`W x`: `[B, H, L, A]` in the accumulation dtype, of `x [B, H, L, D]` and `weight [H | 1, A, D]`.

    Sides may cancel in tanh's argument, so that sum is one of the sums that half precision is too narrow for.
    """
    wide = accumulation_dtype(x.dtype)
    return x.to(wide) @ weight.to(wide).transpose(-1, -2)


def additive_scores(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    """`[B, H, tq, tk]` in the accumulation dtype, of `query [B, H, tq, A]`, `key [B, H, tk, A]` and `v [H, A]`.

    Bahdanau et al. 2014, "Neural Machine Translation by Jointly Learning to Align and Translate", appendix A.1.2. In eager mode
    by blocks on the CPU and, but for float64, on CUDA with triton, exact to the rounding of tanh; elsewhere as written, in
    `tq tk A` temporaries (`by_blocks` tells which). A gradient of a gradient is that of the formula as written.
    """
    if not by_blocks(query, key, v):
        return _as_written(query, key, v)
    if not _by_kernels(query, key, v):
        wide = accumulation_dtype(query.dtype)
        query, key, v = query.to(wide), key.to(wide), v.to(wide)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or v.requires_grad):
        scores: Tensor = _Scores.apply(query, key, v)  # type: ignore[no-untyped-call]
        return scores
    return _forward_of(query, key, v)


def by_blocks(*tensors: Tensor) -> bool:
    """Whether `additive_scores` of such tensors forms no `[tq, tk, A]`: plain ones, of a device that is served, and no trace."""
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
        and (all(x.is_cpu for x in tensors) or _by_kernels(*tensors))
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and not torch.autograd.forward_ad._current_level >= 0
    )


def _by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton kernels serve these: on one CUDA device, or on the CPU where Triton is told to interpret."""
    device = tensors[0].device
    return all(x.dtype in _KERNEL_DTYPES and x.device == device for x in tensors) and kernels_serve(
        device.type
    )


def _as_written(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    hidden = torch.tanh(query.to(wide)[:, :, :, None] + key.to(wide)[:, :, None])  # [B, H, tq, tk, A]
    return torch.einsum("bhqka,ha->bhqk", hidden, v.to(wide))


def _forward_of(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    if _by_kernels(query, key, v):
        from attnlab.engines import additive_triton

        return additive_triton.forward(query, key, v)
    return _forward(query, key, v)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, v)
        return _forward_of(query, key, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, v = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are wanted
            scores = _as_written(query, key, v)
            wanted = [x for x, n in zip((query, key, v), ctx.needs_input_grad, strict=True) if n]
            found = iter(torch.autograd.grad(scores, wanted, grad, create_graph=True))
            return tuple(next(found) if n else None for n in ctx.needs_input_grad)
        if _by_kernels(query, key, v):
            from attnlab.engines import additive_triton

            return additive_triton.backward(grad, query, key, v)
        return _backward(grad, query, key, v)


def _blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """`(rows, columns)` of a block: whole rows of keys where they fit."""
    rows, columns, width = query.shape[2], key.shape[2], query.shape[3]
    columns = min(columns, max(64, BLOCK_ELEMENTS // (width * 8)))
    return min(rows, max(1, BLOCK_ELEMENTS // (columns * width))), columns


def _within_reach(*tensors: Tensor) -> bool:
    return all(x.numel() == 0 or bool(x.abs().amax() <= REACH) for x in tensors)  # False for NaN


def _forward(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    batch, heads, tq, width = query.shape
    tk = key.shape[2]
    scores = query.new_empty(batch, heads, tq, tk)
    rows, columns = _blocks(query, key)
    near = _within_reach(query, key)
    for b in range(batch):
        for h in range(heads):
            q, k = query[b, h, :, :, None], key[b, h].T.contiguous()  # [tq, A, 1], [A, tk]
            lead = v[h].expand(tq, 1, width)
            if near:
                q, k = torch.exp(-2 * q), torch.exp(2 * k)
                lead = -2 * lead * q.transpose(1, 2)
            whole = v[h].sum()
            block = query.new_empty(rows, width, columns)
            for i in range(0, tq, rows):
                part = q[i : i + rows]
                for j in range(0, tk, columns):
                    other = k[:, j : j + columns]
                    here = _view(block, part.shape[0], other.shape[1])
                    torch.add(part, other, out=here)
                    if near:
                        here.reciprocal_()
                        sums = torch.bmm(lead[i : i + rows], here)[:, 0]
                        torch.add(sums, whole, out=scores[b, h, i : i + rows, j : j + columns])
                    else:
                        here.tanh_()
                        scores[b, h, i : i + rows, j : j + columns] = torch.bmm(lead[i : i + rows], here)[
                            :, 0
                        ]
    return scores


def _view(block: Tensor, rows: int, columns: int) -> Tensor:
    if block.shape[0] == rows and block.shape[2] == columns:
        return block
    return block.view(-1)[: rows * block.shape[1] * columns].view(rows, block.shape[1], columns)


def _backward(grad: Tensor, query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and v for `grad [B, H, tq, tk]` of the scores."""
    batch, heads, tq, width = query.shape
    tk = key.shape[2]
    grad_query, grad_key, grad_v = torch.empty_like(query), torch.empty_like(key), torch.zeros_like(v)
    rows, columns = _blocks(query, key)
    near = _within_reach(query, key)
    for b in range(batch):
        for h in range(heads):
            q, k = query[b, h], key[b, h].T.contiguous()
            if near:
                q, k = torch.exp(-2 * q), torch.exp(2 * k)
            g = grad[b, h]
            of_query, of_key, of_v = q.new_zeros(tq, width), q.new_zeros(width, tk), q.new_zeros(tq, 1, width)
            block = q.new_empty(rows, width, columns)
            for i in range(0, tq, rows):
                stop = min(i + rows, tq)
                part = q[i:stop, :, None]
                for j in range(0, tk, columns):
                    end = min(j + columns, tk)
                    gs = g[i:stop, None, j:end]
                    here = _view(block, stop - i, end - j)
                    torch.add(part, k[:, j:end], out=here)
                    if near:  # u r is sigmoid(-2 (q + k)), and the derivative of tanh 4 u r (1 - u r)
                        here.reciprocal_().mul_(part)
                        of_v[i:stop] += torch.bmm(gs, here.transpose(1, 2))
                        here.addcmul_(here, here, value=-1)
                    else:
                        here.tanh_()
                        of_v[i:stop] += torch.bmm(gs, here.transpose(1, 2))
                        here.square_().neg_().add_(1)
                    here.mul_(gs)
                    of_query[i:stop] += here.sum(2)
                    of_key[:, j:end] += here.sum(0)
            lead = 4 * v[h] if near else v[h]
            torch.mul(of_query, lead, out=grad_query[b, h])
            torch.mul(of_key.T, lead, out=grad_key[b, h])
            summed = of_v.sum((0, 1))
            grad_v[h] += g.sum() - 2 * summed if near else summed
    return grad_query, grad_key, grad_v
