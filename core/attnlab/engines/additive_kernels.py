"""The Triton kernels of the additive score, and nothing else: this module imports triton. `additive_triton` launches them.

`y = u / (u + e)` with `u = exp(-2 q)`, `e = exp(2 k)` is the logistic function of -2 s, s = q + k, so `tanh s = 1 - 2 y`,
and with `z = e / (u + e)` its derivative is `4 y z`. u and e are made once for each row and channel: what remains for each pair
and channel is a sum and a reciprocal. A block of rows that reaches beyond `REACH` is marked far, and tiles of such a block
are computed from q + k itself.

Notation: bh item and head, i and j rows of the two sides, d channel; "mine" is the side whose rows a program owns, "theirs" the side that it walks.
Offsets that grow with a tensor are 64-bit. What is known of these kernels: in Triton's interpreter they agree with the float64
formula, and Triton compiles them for sm_80 to sm_120 without spills (`make kernels`). No GPU has run them.
"""

import triton
import triton.language as tl

from attnlab.engines.additive_cpu import REACH as _REACH

REACH: tl.constexpr = tl.constexpr(_REACH)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: products of the first with small integers are exact.
LN2_HIGH: tl.constexpr = tl.constexpr(0.693145751953125)
LN2_LOW: tl.constexpr = tl.constexpr(1.428606820309417e-06)


@triton.jit
def exp_twice(x):
    """exp(2 x) of float32 to a few units in the last place, |x| <= REACH: exp2 alone loses the bits of a large argument."""
    n = tl.floor(x * (2 * LOG2E) + 0.5)
    rest = (2 * x - n * LN2_HIGH) - n * LN2_LOW
    return tl.exp2(n) * tl.exp2(rest * LOG2E)


@triton.jit
def logistic(x):
    """1 / (1 + exp(-2 x)), right for every x."""
    return 1.0 / (1.0 + tl.exp2(x * (-2 * LOG2E)))


@triton.jit
def prepare_kernel(
    x,
    made,
    far,
    strides,
    heads,
    length,
    width,
    SIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """What the others read of x [B, H, L, A] of any strides, turned and padded: L to whole blocks of BLOCK, A to whole groups.

    made: float32 [2, B, H, A, L], first exp(2 SIGN x), then x itself; as if x were 0 in the padding. far: int32 [B, H, blocks],
    1 where a block has anything beyond REACH, NaN too, and its powers are of no use. Grid (B H blocks,).
    """
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    bh = (program // blocks).to(tl.int64)
    rows = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    padded_width = tl.cdiv(width, GROUP) * GROUP
    plane = tl.num_programs(0).to(tl.int64) * BLOCK * padded_width
    x_at = x + bh // heads * strides[0] + bh % heads * strides[1] + rows * strides[2]
    made_at = made + bh * padded_width * (blocks * BLOCK) + rows
    beyond = tl.zeros([BLOCK, CHANNELS], tl.int32)
    for first in range(0, width, CHANNELS):
        d = (first + tl.arange(0, CHANNELS)).to(tl.int64)[None, :]
        values = tl.load(x_at + d * strides[3], mask=(rows < length) & (d < width), other=0.0).to(tl.float32)
        near = tl.abs(values) <= REACH
        beyond = beyond | tl.where(near, 0, 1)
        out = made_at + d * (blocks * BLOCK)
        tl.store(out, exp_twice(tl.where(near, values, 0.0) * SIGN), mask=d < padded_width)
        tl.store(out + plane, values, mask=d < padded_width)
    tl.store(far + program, tl.max(tl.max(beyond, axis=1), axis=0))


@triton.jit
def scores_kernel(
    queries,
    keys,
    v,
    query_far,
    key_far,
    scores,
    v_strides,
    items,
    heads,
    tq,
    tk,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """scores, contiguous float32 [B, H, tq, tk]: sum_d v[h, d] tanh(query[b, h, i, d] + key[b, h, j, d]), one tile a program.

    queries, keys and the marks are `prepare_kernel`'s, with SIGN -1 and 1, for blocks of BLOCK_M and BLOCK_N; v [H, A] is of any
    strides; items is B. Grid (tiles,), those of a row beside each other.
    """
    down = tl.cdiv(tq, BLOCK_M)
    across = tl.cdiv(tk, BLOCK_N)
    program = tl.program_id(0)
    column = program % across
    row = program // across % down
    bh = (program // across // down).to(tl.int64)
    padded_width = tl.cdiv(width, GROUP) * GROUP
    q_step = down * BLOCK_M
    k_step = across * BLOCK_N
    q_at = queries + bh * padded_width * q_step + row * BLOCK_M
    k_at = keys + bh * padded_width * k_step + column * BLOCK_N
    v_at = v + bh % heads * v_strides[0]
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if tl.load(query_far + bh * down + row) + tl.load(key_far + bh * across + column) == 0:
        for _ in range(width):
            u = tl.load(q_at + i)
            r = 1.0 / (u + tl.load(k_at + j))
            total += tl.load(v_at).to(tl.float32) * (1.0 - (2.0 * u) * r)
            q_at += q_step
            k_at += k_step
            v_at += v_strides[1]
    else:
        planes = items.to(tl.int64) * heads * padded_width
        q_at += planes * q_step
        k_at += planes * k_step
        for _ in range(width):
            y = logistic(-(tl.load(q_at + i) + tl.load(k_at + j)))
            total += tl.load(v_at).to(tl.float32) * (1.0 - 2.0 * y)
            q_at += q_step
            k_at += k_step
            v_at += v_strides[1]
    rows = row * BLOCK_M + i
    cols = column * BLOCK_N + j
    tl.store(scores + (bh * tq + rows) * tk + cols, total, mask=(rows < tq) & (cols < tk))


@triton.jit
def gradient_kernel(
    mine,
    theirs,
    v,
    mine_far,
    theirs_far,
    grad,
    grad_mine,
    grad_v,
    v_strides,
    grad_strides,
    items,
    heads,
    length,
    others,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """grad_mine, contiguous float32 [B, H, length, A]: v_d sum_j g_ij 4 y z for a block of rows i and GROUP channels d.

    Queries are "mine" and keys "theirs", or the other way round: the derivative is the same. grad [B, H, length, others] comes
    with its strides, along mine before along theirs. grad_v, contiguous float32 [B, H, blocks, A], is an argument where queries are
    mine: sum_ij g_ij tanh over the block. mine, theirs and the marks are `prepare_kernel`'s for blocks of BLOCK_M and BLOCK_N.
    Grid (B H blocks groups,), groups of channels beside each other.
    """
    blocks = tl.cdiv(length, BLOCK_M)
    walked = tl.cdiv(others, BLOCK_N)
    groups = tl.cdiv(width, GROUP)
    program = tl.program_id(0)
    group = program % groups
    block = program // groups % blocks
    bh = (program // groups // blocks).to(tl.int64)
    d = (group * GROUP + tl.arange(0, GROUP)).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = bh * (groups * GROUP) + d  # of all that were prepared
    plane = items.to(tl.int64) * heads * (groups * GROUP)
    # Tiles are [GROUP, BLOCK_M, BLOCK_N].
    mine_at = mine + channel[:, None, None] * (blocks * BLOCK_M) + rows[None, :, None]
    own_power = tl.load(mine_at)
    own = tl.load(mine_at + plane * (blocks * BLOCK_M))
    own_far = tl.load(mine_far + bh * blocks + block)
    theirs_at = theirs + channel[:, None, None] * (walked * BLOCK_N) + tl.arange(0, BLOCK_N)[None, None, :]
    far_at = theirs_far + bh * walked
    grad_at = grad + bh // heads * grad_strides[0] + bh % heads * grad_strides[1]
    grad_at += rows.to(tl.int64)[:, None] * grad_strides[2]
    sums = tl.zeros([GROUP, BLOCK_M, BLOCK_N], tl.float32)
    v_sums = tl.zeros([GROUP, BLOCK_M, BLOCK_N], tl.float32)
    for n in range(walked):
        cols = (n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
        pairs = (rows < length)[:, None] & (cols < others)
        g = tl.load(grad_at + cols * grad_strides[3], mask=pairs, other=0.0).to(tl.float32)[None, :, :]
        if own_far + tl.load(far_at + n) == 0:
            power = tl.load(theirs_at)
            r = 1.0 / (own_power + power)
            y = own_power * r
            z = power * r
        else:
            s = own + tl.load(theirs_at + plane * (walked * BLOCK_N))
            y = logistic(-s)
            z = logistic(s)
        sums += g * (y * z)
        if grad_v is not None:
            v_sums += g * (1.0 - 2.0 * y)
        theirs_at += BLOCK_N
    v_d = tl.load(v + bh % heads * v_strides[0] + d * v_strides[1], mask=d < width, other=0.0)
    of_mine = tl.sum(sums, axis=2) * (4.0 * v_d.to(tl.float32))[:, None]
    at = grad_mine + (bh * length + rows)[None, :] * width + d[:, None]
    tl.store(at, of_mine, mask=(rows < length)[None, :] & (d < width)[:, None])
    if grad_v is not None:
        of_v = tl.sum(tl.sum(v_sums, axis=2), axis=1)
        tl.store(grad_v + (bh * blocks + block) * width + d, of_v, mask=d < width)
