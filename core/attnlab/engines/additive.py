"""The additive score `sum_d v_d tanh(q_d + k_d)` of a tile, without `[tq, tk, A]` and without a tanh for each of its elements.

With `u = exp(-2 q)` and `e = exp(2 k)`, made once for each row, `tanh(q + k) = 1 - 2 u / (u + e)`: an addition and a division
for each element. The derivative is `4 u e / (u + e)^2`, so that backward needs the same reciprocals again, and keeps nothing
but its inputs. Powers of e have a range: rows beyond its reach go by tanh itself. On the CPU torch does this in bounded
temporaries, see `additive_cpu`; on CUDA Triton kernels do, see `additive_triton`. No GPU has run those.

Notation: tq, tk sides of the tile, A hidden size. Needs torch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnlab.engines import additive_cpu, additive_triton
from attnlab.engines.heads import accumulation_dtype, in_own_precision
from attnlab.engines.triton_launch import are_plain, kernels_serve

# Each channel is two calls over the tiles of some heads on the CPU, so tiles four times as large pay.
_TILE_COST = 0.25
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
    `tq tk A` temporaries, as `additive_tile_cost` says. A gradient of a gradient is that of the formula as written.
    """
    if not _by_blocks(query, key, v):
        return _as_written(query, key, v)
    if not _by_kernels(query, key, v):
        wide = accumulation_dtype(query.dtype)
        query, key, v = query.to(wide), key.to(wide), v.to(wide)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or v.requires_grad):
        # A view, as the backward cannot query a leaf about its gradient.
        scores: Tensor = _Scores.apply(query, key, v.view_as(v))  # type: ignore[no-untyped-call]
        return scores
    made: Tensor = _engine(query, key, v).forward(query, key, v)
    return made


def additive_tile_cost(query: Tensor, v: Tensor) -> float:
    """`Scoring.cost` of `additive_scores` for tensors such as these."""
    return _TILE_COST if _by_blocks(query, v) else v.shape[-1]


def _by_blocks(*tensors: Tensor) -> bool:
    """Whether `additive_scores` of such tensors forms no `[tq, tk, A]`: plain ones, of a device that is served, and no trace."""
    return are_plain(*tensors) and (all(x.is_cpu for x in tensors) or _by_kernels(*tensors))


def _by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton kernels serve these: on one CUDA device, or on the CPU where Triton is told to interpret."""
    device = tensors[0].device
    return all(x.dtype in _KERNEL_DTYPES and x.device == device for x in tensors) and kernels_serve(device.type)


def _as_written(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    hidden = torch.tanh(query.to(wide)[:, :, :, None] + key.to(wide)[:, :, None])  # [B, H, tq, tk, A]
    return torch.einsum("bhqka,ha->bhqk", hidden, v.to(wide))


def _engine(*tensors: Tensor) -> ModuleType:
    return additive_triton if _by_kernels(*tensors) else additive_cpu


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, v)
        made: Tensor = _engine(query, key, v).forward(query, key, v)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, v = ctx.saved_tensors
        again = torch.is_grad_enabled()  # second-order gradients
        if again or not are_plain(grad):  # or a batch of gradients came
            with torch.enable_grad():
                scores = _as_written(query, key, v)
            targets = [x for x, n in zip((query, key, v), ctx.needs_input_grad, strict=True) if n]
            gradients = iter(torch.autograd.grad(scores, targets, grad, create_graph=again))
            return tuple(next(gradients) if n else None for n in ctx.needs_input_grad)
        # autograd.grad may ask for less than what needs a gradient.
        node = ctx.next_functions[2][0]
        needs_v = node is not None and torch._C._will_engine_execute_node(node)
        return _gradients(grad, query, key, v, needs_v)


@in_own_precision
def _gradients(grad: Tensor, query: Tensor, key: Tensor, v: Tensor, needs_v: bool) -> tuple[Tensor | None, ...]:
    if _by_kernels(query, key, v):
        return additive_triton.backward(grad, query, key, v)
    return additive_cpu.backward(grad, query, key, v, needs_v)
