"""The additive score of a tile by Triton kernels: their arguments, forward and backward. Needs torch, and triton when called.

Nothing here reads the value of a tensor. Backward keeps the inputs alone and prepares them again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.engines.triton_launch import Configuration, is_interpreted, run_kernel

GROUP = 4
"""Channels that a program of the gradients works on: each element of the scores' gradient is loaded once for all of them."""
CHANNELS = 32
"""Channels that a program of the preparation loads together, a multiple of GROUP."""


class _Side(NamedTuple):
    """Queries or keys as kernels read them: `prepare_kernel`'s results for blocks of `block` rows; the tensor itself for its shape."""

    tensor: Tensor
    made: Tensor
    far: Tensor
    block: int

    @property
    def blocks(self) -> int:
        return self.far.shape[2]


def forward(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    """`scores [B, H, tq, tk]` in float32, of `query [B, H, tq, A]`, `key [B, H, tk, A]` and `v [H, A]`.

    Each is float32, bfloat16 or float16, of any strides; sums are in float32.
    """
    from attnlab.engines.additive_kernels import scores_kernel

    batch, heads, tq, width = query.shape
    tk = key.shape[2]
    tiles = _tiles("scores", query.device)
    queries, keys = _prepared(query, -1, tiles.rows), _prepared(key, 1, tiles.columns)
    scores = torch.empty(batch, heads, tq, tk, dtype=torch.float32, device=query.device)
    run_kernel(
        scores_kernel,
        (batch * heads * queries.blocks * keys.blocks,),
        tiles,
        query.device,
        queries=queries.made,
        keys=keys.made,
        v=v,
        query_far=queries.far,
        key_far=keys.far,
        scores=scores,
        v_strides=v.stride(),
        items=batch,
        heads=heads,
        tq=tq,
        tk=tk,
        width=width,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        GROUP=GROUP,
    )
    return scores


def backward(grad: Tensor, query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and v, in their dtypes, for `grad [B, H, tq, tk]` of the scores. The same bits each time."""
    batch, heads, _, width = query.shape
    tiles = _tiles("gradient", query.device)
    queries, keys = _prepared(query, -1, tiles.rows), _prepared(key, 1, tiles.columns)
    of_v = torch.empty(batch, heads, queries.blocks, width, dtype=torch.float32, device=query.device)
    of_query = _gradient(queries, keys, v, grad, of_v, tiles)
    of_key = _gradient(keys, queries, v, grad.transpose(2, 3), None, tiles)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_v.sum((0, 2)).to(v.dtype)


def _prepared(x: Tensor, sign: int, block: int) -> _Side:
    from attnlab.engines.additive_kernels import prepare_kernel

    batch, heads, length, width = x.shape
    blocks = -(-length // block)
    padded_width = -(-width // GROUP) * GROUP
    made = torch.empty(2, batch, heads, padded_width, blocks * block, dtype=torch.float32, device=x.device)
    far = torch.empty(batch, heads, blocks, dtype=torch.int32, device=x.device)
    run_kernel(
        prepare_kernel,
        (batch * heads * blocks,),
        Configuration(block, CHANNELS, 4, 1),
        x.device,
        x=x,
        made=made,
        far=far,
        strides=x.stride(),
        heads=heads,
        length=length,
        width=width,
        SIGN=sign,
        BLOCK=block,
        CHANNELS=CHANNELS,
        GROUP=GROUP,
    )
    return _Side(x, made, far, block)


def _gradient(mine: _Side, theirs: _Side, v: Tensor, grad: Tensor, of_v: Tensor | None, tiles: Configuration) -> Tensor:
    """`[B, H, L, A]` in float32, of the side that is the rows of `grad [B, H, L, *]`; fills `of_v [B, H, blocks, A]`."""
    from attnlab.engines.additive_kernels import gradient_kernel

    batch, heads, length, width = mine.tensor.shape
    made = torch.empty(batch, heads, length, width, dtype=torch.float32, device=v.device)
    run_kernel(
        gradient_kernel,
        (batch * heads * mine.blocks * -(-width // GROUP),),
        tiles._replace(rows=mine.block, columns=theirs.block),
        v.device,
        mine=mine.made,
        theirs=theirs.made,
        v=v,
        mine_far=mine.far,
        theirs_far=theirs.far,
        grad=grad,
        grad_mine=made,
        grad_v=of_v,
        v_strides=v.stride(),
        grad_strides=grad.stride(),
        items=batch,
        heads=heads,
        length=length,
        others=theirs.tensor.shape[2],
        width=width,
        BLOCK_M=mine.block,
        BLOCK_N=theirs.block,
        GROUP=GROUP,
    )
    return made


def _tiles(kernel: str, device: torch.device) -> Configuration:
    from attnlab.engines.additive_kernels import scores_kernel

    if is_interpreted(scores_kernel):
        return Configuration(16, 32, 4, 1)
    return Configuration(64, 64, 4, 1) if kernel == "scores" else Configuration(16, 32, 4, 1)
