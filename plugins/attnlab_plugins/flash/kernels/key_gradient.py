"""The gradients of keys and values: one program takes a block of keys through the queries that see it. Needs triton.

It walks all query heads of its key/value head, so that grouped heads need neither repeated keys nor atomics. Notation as in
`gradients`.
"""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.gradients import load_sums, score_gradients, weights
from attnlab_plugins.flash.kernels.spans import query_span
from attnlab_plugins.flash.kernels.tile import load_queries, load_rows, narrow, product, row_rules, store_rows


@triton.jit(do_not_specialize=["low", "high", "Lq", "Lk"])
def key_gradient_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_key,
    grad_value,
    bias_columns,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_key_strides,
    grad_value_strides,
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
    """grad_key and grad_value for one block of keys; grid (blocks * B * Hkv,). Arguments as in `query_gradient_kernel`.

    Tiles are [keys, queries], so that weights are the left operand of both sums. bias_columns: float32 [B, Hq, Lk] that
    receives each column's sum of ds, or None.
    """
    BLOCK_M: tl.constexpr = how.BLOCK_M
    BLOCK_N: tl.constexpr = how.BLOCK_N
    BLOCK_D: tl.constexpr = how.BLOCK_D
    BLOCK_DV: tl.constexpr = how.BLOCK_DV
    blocks = tl.cdiv(Lk, BLOCK_N)
    program = tl.program_id(0)
    item_head = program // blocks  # item * key/value heads + head
    block = program % blocks  # the first keys of a causal call are visible to most queries
    b = (item_head // (heads // group)).to(tl.int64)
    kv = (item_head % (heads // group)).to(tl.int64)
    first = block * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    cols = column[:, None]  # [N, 1]
    DTYPE: tl.constexpr = query.dtype.element_ty
    COMPARED: tl.constexpr = (extras.allowed is not None) or (marks.query_segments is not None)
    start, inner, outer, stop = query_span(first, b, block, blocks, Lq, Lk, low, high, marks, COMPARED, how)
    seed = 0
    if extras.seeds is not None:
        seed = tl.load(extras.seeds)

    key += b * key_strides[0] + kv * key_strides[1]
    value += b * value_strides[0] + kv * value_strides[1]
    k = load_rows(key, first, Lk, key_strides, BLOCK_N, how.D, BLOCK_D, True, how)
    v = load_rows(value, first, Lk, value_strides, BLOCK_N, how.DV, BLOCK_DV, True, how)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in tl.range(0, group):
        h = kv * group + g
        pair_head = b * heads + h
        query_base = query + b * query_strides[0] + h * query_strides[1]
        grad_base = grad_out + b * grad_out_strides[0] + h * grad_out_strides[1]
        column_sums = tl.zeros([BLOCK_N], tl.float32)
        for q0 in tl.range(start, stop, BLOCK_M):
            q0 = tl.multiple_of(q0, BLOCK_M)
            line = q0 + tl.arange(0, BLOCK_M)
            rows = line[None, :]  # [1, M]
            limits = row_rules(rows, b, Lq, low, high, marks, how)
            q = load_queries(query_base, q0, Lq, query_strides, not how.EVEN, how)
            do = load_rows(grad_base, q0, Lq, grad_out_strides, BLOCK_M, how.DV, BLOCK_DV, not how.EVEN, how)
            sums, row_delta = load_sums(lse, delta, pair_head * Lq, line, Lq)
            s = product(k, tl.trans(q), None, how)  # [N, M]
            tile = (rows, cols, b, h, q0, first, Lq, Lk)
            p, t, used = weights(
                s,
                sums[None, :],
                tile,
                limits,
                pair_head.to(tl.int32),
                low,
                high,
                marks,
                extras,
                scoring,
                seed,
                COMPARED or (q0 < inner) | (q0 >= outer),
                how,
            )
            dv = product(narrow(used, DTYPE, how), do, dv, how)
            dp = product(v, tl.trans(do), None, how)
            ds, dx = score_gradients(p, t, used, dp, row_delta[None, :], extras, scoring)
            if bias_columns is not None:
                column_sums += tl.sum(ds, 1)
            dk = product(narrow(dx, DTYPE, how), q, dk, how)
        if bias_columns is not None:
            tl.store(bias_columns + pair_head * Lk + column, column_sums, mask=column < Lk)
    size = signed_scale
    if how.SIGN == -1:
        size = -signed_scale  # the queries carry the sign already
    grad_key += b * grad_key_strides[0] + kv * grad_key_strides[1]
    grad_value += b * grad_value_strides[0] + kv * grad_value_strides[1]
    store_rows(grad_key, dk * size, first, Lk, grad_key_strides, BLOCK_N, how.D, BLOCK_D, how)
    store_rows(grad_value, dv, first, Lk, grad_value_strides, BLOCK_N, how.DV, BLOCK_DV, how)
