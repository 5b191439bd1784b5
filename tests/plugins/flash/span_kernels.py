"""Kernels that only say what `spans` computes; loaded by path once the interpreter is on."""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.spans import key_span, query_span
from attnlab_plugins.flash.kernels.tile import kept


@triton.jit
def key_span_kernel(out, low, high, Lq, Lk, marks, how: tl.constexpr):
    block = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    start, inner, outer, stop = key_span(block * how.BLOCK_M, b, block, blocks, Lq, Lk, low, high, marks, False, how)
    at = out + (b * blocks + block) * 4
    tl.store(at, start)
    tl.store(at + 1, inner)
    tl.store(at + 2, outer)
    tl.store(at + 3, stop)


@triton.jit
def query_span_kernel(out, low, high, Lq, Lk, marks, how: tl.constexpr):
    block = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    start, inner, outer, stop = query_span(block * how.BLOCK_N, b, block, blocks, Lq, Lk, low, high, marks, False, how)
    at = out + (b * blocks + block) * 4
    tl.store(at, start)
    tl.store(at + 1, inner)
    tl.store(at + 2, outer)
    tl.store(at + 3, stop)


@triton.jit
def kept_kernel(out, seed, pair_head, dropout_p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    keep = kept(seed, pair_head, rows, cols, dropout_p)
    tl.store(out + rows * (tl.num_programs(1) * COLUMNS) + cols, keep.to(tl.int8))
