"""The forward kernel: one program takes a block of queries of one head through the keys that it can see. Needs triton.

Online softmax [Milakov and Gimelshein 2018; Dao 2023, algorithm 1]: m running maximum, l running sum, acc running p @ v,
all float32. Notation as in `tile`.
"""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.spans import key_span
from attnlab_plugins.flash.kernels.tile import (
    LN2,
    LOG2E,
    kept,
    load_queries,
    load_rows,
    narrow,
    product,
    row_rules,
    scored,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=["low", "high", "Lq", "Lk"])
def forward_kernel(
    query,
    key,
    value,
    out,
    lse,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
    low,
    high,
    sinks,
    heads,
    group,
    Lq,
    Lk,
    marks,
    extras,
    scoring,
    how: tl.constexpr,
):
    """out [B, Hq, Lq, DV] and lse [B, Hq, Lq] (float32, natural log) for one block of queries; grid (blocks * B * Hq,).

    low, high: what is added to a query's index for the least and greatest position it sees; see `arguments.How`. sinks:
    [Hq], contiguous. group: query heads to a key/value head. The rest is described in `arguments`.
    """
    BLOCK_M: tl.constexpr = how.BLOCK_M
    BLOCK_N: tl.constexpr = how.BLOCK_N
    BLOCK_D: tl.constexpr = how.BLOCK_D
    BLOCK_DV: tl.constexpr = how.BLOCK_DV
    blocks = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    pair_head = program // blocks  # item * heads + head
    block = blocks - 1 - program % blocks  # the longest rows of a causal call first
    b = (pair_head // heads).to(tl.int64)
    h = (pair_head % heads).to(tl.int64)
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)[:, None]  # [M, 1]
    DTYPE: tl.constexpr = query.dtype.element_ty
    COMPARED: tl.constexpr = (extras.allowed is not None) or (marks.query_segments is not None)
    PLAIN: tl.constexpr = (scoring.softcap is None) and (extras.bias is None)
    start, inner, outer, stop = key_span(first, b, block, blocks, Lq, Lk, low, high, marks, COMPARED, how)
    limits = row_rules(rows, b, Lq, low, high, marks, how)
    seed = 0
    if extras.seeds is not None:
        seed = tl.load(extras.seeds)

    query += b * query_strides[0] + h * query_strides[1]
    key += b * key_strides[0] + (h // group) * key_strides[1]
    value += b * value_strides[0] + (h // group) * value_strides[1]
    q = load_queries(query, first, Lq, query_strides, True, how)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for k0 in tl.range(start, stop, BLOCK_N):
        k0 = tl.multiple_of(k0, BLOCK_N)
        cols = k0 + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k = load_rows(key, k0, Lk, key_strides, BLOCK_N, how.D, BLOCK_D, not how.EVEN, how)
        x = product(q, tl.trans(k), None, how)  # [M, N]
        tile = (rows, cols, b, h, first, k0, Lq, Lk)
        if not PLAIN:
            x, _ = scored(x, tile, extras, scoring, how)
        if COMPARED or (k0 < inner) | (k0 >= outer):
            pairs = visible(tile, limits, low, high, marks, extras, how)
            x = tl.where(pairs, x, float("-inf"))
        if PLAIN:  # the scale is above 0, so it may follow the maximum and join the subtraction
            higher = tl.maximum(m, tl.max(x, 1) * scoring.scale)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(x * scoring.scale - base[:, None])
        else:
            higher = tl.maximum(m, tl.max(x, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(x - base[:, None])
        fade = tl.exp2(m - base)
        l = l * fade + tl.sum(p, 1)
        if extras.seeds is not None:
            p = tl.where(kept(seed, pair_head, rows, cols, scoring.dropout_p), p, 0.0)
        v = load_rows(value, k0, Lk, value_strides, BLOCK_N, how.DV, BLOCK_DV, not how.EVEN, how)
        acc = product(narrow(p, DTYPE, how), v, acc * fade[:, None], how)
        m = higher

    alive = m > float("-inf")
    top = tl.where(alive, m, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        fade = tl.exp2(m - top)
        l = l * fade + tl.exp2(sink - top)
        acc = acc * fade[:, None]
    l = tl.where(alive, l, 1.0)
    acc = tl.where(alive[:, None], acc * (scoring.keep_scale / l)[:, None], 0.0)
    out += b * out_strides[0] + h * out_strides[1]
    store_rows(out, acc, first, Lq, out_strides, BLOCK_M, how.DV, BLOCK_DV, how)
    line = first + tl.arange(0, BLOCK_M)
    sums = tl.where(alive, (top + tl.log2(l)) * LN2, float("-inf"))
    tl.store(lse + pair_head.to(tl.int64) * Lq + line, sums, mask=line < Lq)
