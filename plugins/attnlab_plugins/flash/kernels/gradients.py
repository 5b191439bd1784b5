"""What the backward kernels share: the gradient of a tile of scores, and delta. Needs triton; imported by kernels only.

Notation as in `tile`, and: p weights, do gradient of out, dp = do @ v^T, delta = sum over width of out * do, less lse's gradient;
ds = p (dp - delta) is the gradient of score + bias [Dao 2023, algorithm 2], dx = ds (1 - t^2) that of the scaled product.
"""

import triton
import triton.language as tl

from attnlab_plugins.flash.kernels.tile import LOG2E, kept, load_rows, scored, visible


@triton.jit(do_not_specialize=["Lq"])
def delta_kernel(
    out, grad_out, grad_lse, delta, out_strides, grad_strides, grad_lse_strides, heads, Lq, how: tl.constexpr
):
    """delta [B, Hq, Lq], float32; grid (blocks * B * Hq,)."""
    blocks = tl.cdiv(Lq, how.BLOCK_M)
    program = tl.program_id(0)
    pair_head = program // blocks
    first = program % blocks * how.BLOCK_M
    b = (pair_head // heads).to(tl.int64)
    h = (pair_head % heads).to(tl.int64)
    out += b * out_strides[0] + h * out_strides[1]
    grad_out += b * grad_strides[0] + h * grad_strides[1]
    o = load_rows(out, first, Lq, out_strides, how.BLOCK_M, how.DV, how.BLOCK_DV, True, how)
    do = load_rows(grad_out, first, Lq, grad_strides, how.BLOCK_M, how.DV, how.BLOCK_DV, True, how)
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    line = first + tl.arange(0, how.BLOCK_M)
    if grad_lse is not None:
        at = grad_lse + b * grad_lse_strides[0] + h * grad_lse_strides[1] + line.to(tl.int64) * grad_lse_strides[2]
        sums -= tl.load(at, mask=line < Lq, other=0.0)
    tl.store(delta + pair_head.to(tl.int64) * Lq + line, sums, mask=line < Lq)


@triton.jit
def load_sums(lse, delta, at, line, Lq):
    """(lse in units of log2, delta) of rows; a row that sees nothing, or is none, gets lse +inf: all its weights are 0."""
    sums = tl.load(lse + at + line, mask=line < Lq, other=float("-inf")) * LOG2E
    sums = tl.where(sums == float("-inf"), float("inf"), sums)
    return sums, tl.load(delta + at + line, mask=line < Lq, other=0.0)


@triton.jit
def weights(s, sums, tile, limits, pair_head, low, high, marks, extras, scoring, seed, compare, how: tl.constexpr):
    """(p, t, used) of a tile: weights, tanh of the softcap, and the weights that dropout leaves. sums are `load_sums`', shaped as `rows`."""
    x, t = scored(s, tile, extras, scoring, how)
    if compare:
        pairs = visible(tile, limits, low, high, marks, extras, how)
        x = tl.where(pairs, x, float("-inf"))
    p = tl.exp2(tl.minimum(x - sums, 0.0))  # above 0 by rounding alone, which for huge scores could overflow
    used = p
    if extras.seeds is not None:
        used = tl.where(kept(seed, pair_head, tile[0], tile[1], scoring.dropout_p), p * scoring.keep_scale, 0.0)
    return p, t, used


@triton.jit
def score_gradients(p, t, used, dp, delta, extras, scoring):
    """(ds, dx) of a tile from `weights`' answer; delta is shaped as its rows. A dropped weight has no part in dp."""
    if extras.seeds is not None:
        ds = used * dp - p * delta
    else:
        ds = p * (dp - delta)
    dx = ds
    if scoring.softcap is not None:
        dx = ds * (1.0 - t * t)
    return ds, dx
