"""The gradient of a bias that differs by query and key: one program owns one tile of it and sums over what it broadcasts.

It computes the scores a third time: that is cheaper than keeping ds of every pair, and each sum has one owner, so its bits do
not vary. Biases of one row or one column are summed by the other backward kernels on their way. Needs triton.
"""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.gradients import load_sums, score_gradients, weights
from attnlab_plugins.flash.kernels.spans import item_bounds
from attnlab_plugins.flash.kernels.tile import load_queries, load_rows, narrow, product, row_rules


@triton.jit(do_not_specialize=["low", "high", "items", "Lq", "Lk"])
def bias_gradient_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_bias,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    low,
    high,
    items,
    heads,
    group,
    Lq,
    Lk,
    marks,
    extras,
    scoring,
    how: tl.constexpr,
):
    """grad_bias, contiguous [B|1, Hq|1, Lq, Lk], for one tile of it; grid (tiles,), those of one row beside each other.

    items: B. Other arguments as in `query_gradient_kernel`.
    """
    BLOCK_M: tl.constexpr = how.BLOCK_M
    BLOCK_N: tl.constexpr = how.BLOCK_N
    BLOCK_D: tl.constexpr = how.BLOCK_D
    BLOCK_DV: tl.constexpr = how.BLOCK_DV
    across = tl.cdiv(Lk, BLOCK_N)
    down = tl.cdiv(Lq, BLOCK_M)
    program = tl.program_id(0)
    k0 = program % across * BLOCK_N
    q0 = program // across % down * BLOCK_M
    plane = program // across // down  # of grad_bias
    first_item = plane * 0
    first_head = plane * 0
    count_items = items
    count_heads = heads
    if how.BIAS_PER_HEAD:
        first_head = plane % heads
        count_heads = 1
    if how.BIAS_PER_ITEM:
        first_item = plane
        if how.BIAS_PER_HEAD:
            first_item = plane // heads
        count_items = 1
    line = q0 + tl.arange(0, BLOCK_M)
    rows = line[:, None]  # [M, 1]
    cols = k0 + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
    seed = 0
    if extras.seeds is not None:
        seed = tl.load(extras.seeds)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(0, count_items):
        item = first_item + n
        b = item.to(tl.int64)
        limits = row_rules(rows, b, Lq, low, high, marks, how)
        some = k0 < Lk  # whether bounds leave any pair of the tile
        if how.BOUNDS != "query":
            lowest, highest = item_bounds(b, low, high, how)
            if low is not None:
                some = some & (k0 + BLOCK_N > q0 + lowest)
            if high is not None:
                some = some & (k0 < q0 + BLOCK_M + highest)
        for g in tl.range(0, tl.where(some, count_heads, 0)):
            head = first_head + g
            h = head.to(tl.int64)
            query_base = query + b * query_strides[0] + h * query_strides[1]
            grad_base = grad_out + b * grad_out_strides[0] + h * grad_out_strides[1]
            key_base = key + b * key_strides[0] + (h // group) * key_strides[1]
            value_base = value + b * value_strides[0] + (h // group) * value_strides[1]
            q = load_queries(query_base, q0, Lq, query_strides, True, how)
            do = load_rows(grad_base, q0, Lq, grad_out_strides, BLOCK_M, how.DV, BLOCK_DV, True, how)
            k = load_rows(key_base, k0, Lk, key_strides, BLOCK_N, how.D, BLOCK_D, True, how)
            v = load_rows(value_base, k0, Lk, value_strides, BLOCK_N, how.DV, BLOCK_DV, True, how)
            sums, row_delta = load_sums(lse, delta, (b * heads + h) * Lq, line, Lq)
            s = product(q, tl.trans(k), None, how)
            tile = (rows, cols, b, h, q0, k0, Lq, Lk)
            p, t, used = weights(
                s, sums[:, None], tile, limits, item * heads + head, low, high, marks, extras, scoring, seed, True, how
            )
            dp = product(do, tl.trans(v), None, how)
            ds, _ = score_gradients(p, t, used, dp, row_delta[:, None], extras, scoring)
            total += ds
    at = grad_bias + (plane.to(tl.int64) * Lq + rows) * Lk + cols
    tl.store(at, narrow(total, grad_bias.dtype.element_ty, how), mask=(rows < Lq) & (cols < Lk))
