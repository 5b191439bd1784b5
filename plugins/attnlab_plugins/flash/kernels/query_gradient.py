"""The gradient of queries: one program takes a block of queries of one head through the keys that it can see. Needs triton.

Dao 2023, algorithm 2, is split in two kernels so that every sum has one owner: no atomics, the same bits each time. Notation
as in `gradients`.
"""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.gradients import load_sums, score_gradients, weights
from attnlab_plugins.flash.kernels.spans import key_span
from attnlab_plugins.flash.kernels.tile import load_queries, load_rows, narrow, product, row_rules, store_rows


@triton.jit(do_not_specialize=["low", "high", "Lq", "Lk"])
def query_gradient_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_query,
    bias_rows,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_query_strides,
    low,
    high,
    heads,
    group,
    Lq,
    Lk,
    signed_scale,
    marks,
    extras,
    scoring,
    how: tl.constexpr,
):
    """grad_query for one block of queries; grid (blocks * B * Hq,). Arguments as in `forward_kernel`.

    bias_rows: float32 [B, Hq, Lq] that receives each row's sum of ds, or None. signed_scale: natural, as the caller gave it.
    """
    BLOCK_M: tl.constexpr = how.BLOCK_M
    BLOCK_N: tl.constexpr = how.BLOCK_N
    BLOCK_D: tl.constexpr = how.BLOCK_D
    BLOCK_DV: tl.constexpr = how.BLOCK_DV
    blocks = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    pair_head = program // blocks
    block = blocks - 1 - program % blocks
    b = (pair_head // heads).to(tl.int64)
    h = (pair_head % heads).to(tl.int64)
    first = block * BLOCK_M
    line = first + tl.arange(0, BLOCK_M)
    rows = line[:, None]  # [M, 1]
    DTYPE: tl.constexpr = query.dtype.element_ty
    COMPARED: tl.constexpr = (extras.allowed is not None) or (marks.query_segments is not None)
    start, inner, outer, stop = key_span(first, b, block, blocks, Lq, Lk, low, high, marks, COMPARED, how)
    limits = row_rules(rows, b, Lq, low, high, marks, how)
    seed = 0
    if extras.seeds is not None:
        seed = tl.load(extras.seeds)

    query += b * query_strides[0] + h * query_strides[1]
    grad_out += b * grad_out_strides[0] + h * grad_out_strides[1]
    key += b * key_strides[0] + (h // group) * key_strides[1]
    value += b * value_strides[0] + (h // group) * value_strides[1]
    q = load_queries(query, first, Lq, query_strides, True, how)
    do = load_rows(grad_out, first, Lq, grad_out_strides, BLOCK_M, how.DV, BLOCK_DV, True, how)
    sums, row_delta = load_sums(lse, delta, pair_head.to(tl.int64) * Lq, line, Lq)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sums = tl.zeros([BLOCK_M], tl.float32)
    for k0 in tl.range(start, stop, BLOCK_N):
        k0 = tl.multiple_of(k0, BLOCK_N)
        cols = k0 + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        k = load_rows(key, k0, Lk, key_strides, BLOCK_N, how.D, BLOCK_D, not how.EVEN, how)
        v = load_rows(value, k0, Lk, value_strides, BLOCK_N, how.DV, BLOCK_DV, not how.EVEN, how)
        s = product(q, tl.trans(k), None, how)  # [M, N]
        tile = (rows, cols, b, h, first, k0, Lq, Lk)
        p, t, used = weights(
            s,
            sums[:, None],
            tile,
            limits,
            pair_head,
            low,
            high,
            marks,
            extras,
            scoring,
            seed,
            COMPARED or (k0 < inner) | (k0 >= outer),
            how,
        )
        dp = product(do, tl.trans(v), None, how)
        ds, dx = score_gradients(p, t, used, dp, row_delta[:, None], extras, scoring)
        if bias_rows is not None:
            row_sums += tl.sum(ds, 1)
        dq = product(narrow(dx, DTYPE, how), k, dq, how)
    grad_query += b * grad_query_strides[0] + h * grad_query_strides[1]
    store_rows(grad_query, dq * signed_scale, first, Lq, grad_query_strides, BLOCK_M, how.D, BLOCK_D, how)
    if bias_rows is not None:
        tl.store(bias_rows + pair_head.to(tl.int64) * Lq + line, row_sums, mask=line < Lq)
