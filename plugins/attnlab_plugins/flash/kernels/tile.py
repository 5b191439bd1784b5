"""What every flash kernel does to a tile: load rows, multiply, score, hide, drop. Needs triton; imported by kernels only.

Notation: b item, h query head; a tile is [rows, cols] or [cols, rows] of pairs, `rows` (queries) and `cols` (keys) are index
tensors that broadcast to it, so that one function serves both orientations. s products, x scores in units of log2 (score
times log2 e), t tanh of the softcap. Item and head offsets and the start of a tile are 64-bit; inside a tile offsets are
32-bit unless `how.WIDE`.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FINITE: tl.constexpr = tl.constexpr(2.3e38)  # times log2 e it is still a float32


@triton.jit
def product(a, b, acc, how: tl.constexpr):
    """a @ b + acc in float32. UPCAST: the interpreter multiplies the bit patterns of bfloat16; float32 holds its values exactly."""
    if how.UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=how.PRECISION)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, how: tl.constexpr):
    """float32 `x` rounded to DTYPE. UPCAST: the interpreter does not round to bfloat16; its bits are rounded to even first."""
    if how.UPCAST:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def row_pointers(base, first, strides, BLOCK: tl.constexpr, PADDED: tl.constexpr, how: tl.constexpr):
    """Pointers [BLOCK, PADDED] to rows [first, first + BLOCK); base is where item and head start."""
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    if how.WIDE:
        r = r.to(tl.int64)
        d = d.to(tl.int64)
    return (base + first.to(tl.int64) * strides[2]) + (r[:, None] * strides[2] + d[None, :] * strides[3])


@triton.jit
def load_rows(
    base,
    first,
    length,
    strides,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BOUNDED: tl.constexpr,
    how: tl.constexpr,
):
    """Rows [first, first + BLOCK) of a matrix [length, WIDTH] as [BLOCK, PADDED]; zeros beyond WIDTH, and beyond length if BOUNDED."""
    at = row_pointers(base, first, strides, BLOCK, PADDED, how)
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, PADDED)
    if BOUNDED and WIDTH < PADDED:
        x = tl.load(at, mask=(first + r < length)[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif BOUNDED:
        x = tl.load(at, mask=(first + r < length)[:, None], other=0.0)
    elif WIDTH < PADDED:
        x = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(
    base, x, first, length, strides, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, how: tl.constexpr
):
    """The counterpart of `load_rows`: what lies beyond length or WIDTH is not stored."""
    at = row_pointers(base, first, strides, BLOCK, PADDED, how)
    keep = (first + tl.arange(0, BLOCK) < length)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
    tl.store(at, narrow(x, base.dtype.element_ty, how), mask=keep)


@triton.jit
def load_queries(base, first, Lq, strides, BOUNDED: tl.constexpr, how: tl.constexpr):
    """A block of queries that carries the scale's sign, so that the scale itself is above 0."""
    q = load_rows(base, first, Lq, strides, how.BLOCK_M, how.D, how.BLOCK_D, BOUNDED, how)
    if how.SIGN != 1:
        q = narrow(q.to(tl.float32) * how.SIGN, base.dtype.element_ty, how)
    return q


@triton.jit
def load_pairs(base, strides, tile, PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, how: tl.constexpr):
    """A tile of a tensor over pairs; one row or one column of it where the other axis broadcasts. 0 outside.

    tile: (rows, cols, b, h, q0, k0, Lq, Lk), of which q0 and k0, its first query and key, have 64-bit offsets.
    """
    rows, cols, b, h, q0, k0, Lq, Lk = tile
    base += b * strides[0] + h * strides[1]
    r = rows - q0
    c = cols - k0
    if how.WIDE:
        r = r.to(tl.int64)
        c = c.to(tl.int64)
    if PER_QUERY and PER_KEY:
        base += q0.to(tl.int64) * strides[2] + k0.to(tl.int64) * strides[3]
        x = tl.load(base + (r * strides[2] + c * strides[3]), mask=(rows < Lq) & (cols < Lk), other=0)
    elif PER_KEY:
        x = tl.load(base + k0.to(tl.int64) * strides[3] + c * strides[3], mask=cols < Lk, other=0)
    else:
        x = tl.load(base + q0.to(tl.int64) * strides[2] + r * strides[2], mask=rows < Lq, other=0)
    return x


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh of float32; PRECISE: to about 2 units in the last place near 0 too, where 1 - exp cancels."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0, -y, y)
    if PRECISE:
        z = x * x
        near = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
        y = tl.where(tl.abs(x) < 0.25, near, y)
    return y


@triton.jit
def scored(s, tile, extras, scoring, how: tl.constexpr):
    """(x, t): products to scores in units of log2; t is s itself where there is no softcap."""
    t = s
    if scoring.softcap is not None:
        t = tanh(s * (scoring.scale / scoring.softcap), how.PRECISION == "ieee")
        x = t * (scoring.softcap * LOG2E)
    else:
        x = s * scoring.scale
    if extras.bias is not None:
        bias = load_pairs(extras.bias, extras.bias_strides, tile, how.BIAS_PER_QUERY, how.BIAS_PER_KEY, how)
        # Only -inf hides: what is finite stays finite in units of log2.
        bias = bias.to(tl.float32)
        near = tl.minimum(tl.maximum(bias, -FINITE), FINITE)
        x += tl.where(bias == float("-inf"), bias, near) * LOG2E
    return x, t


@triton.jit
def row_rules(rows, b, Lq, low, high, marks, how: tl.constexpr):
    """(least, greatest, segment): positions that each row sees, and its segment; `rows` itself for a rule that the call does not have."""
    least = rows
    greatest = rows
    segment = rows
    if low is not None:
        if how.BOUNDS == "query":
            least = tl.load(low + b * Lq + rows, mask=rows < Lq, other=0)
        elif how.BOUNDS == "item":
            least = rows + tl.load(low + b)
        else:
            least = rows + low
    if high is not None:
        if how.BOUNDS == "query":
            greatest = tl.load(high + b * Lq + rows, mask=rows < Lq, other=0)
        elif how.BOUNDS == "item":
            greatest = rows + tl.load(high + b)
        else:
            greatest = rows + high
    if marks.query_segments is not None:
        segment = tl.load(marks.query_segments + b * Lq + rows, mask=rows < Lq, other=-2)
    return least, greatest, segment


@triton.jit
def visible(tile, limits, low, high, marks, extras, how: tl.constexpr):
    """The visible pairs of a tile, bool. tile as in `load_pairs`; limits are `row_rules`', low and high say which of them apply."""
    _, cols, b, _, _, _, _, Lk = tile
    least, greatest, segment = limits
    pairs = cols < Lk
    position = cols
    if marks.key_positions is not None:
        position = tl.load(marks.key_positions + b * Lk + cols, mask=cols < Lk, other=0)
    if high is not None:
        pairs = pairs & (position <= greatest)
    if low is not None:
        pairs = pairs & (position >= least)
    if marks.query_segments is not None:
        pairs = pairs & (tl.load(marks.key_segments + b * Lk + cols, mask=cols < Lk, other=-1) == segment)
    if marks.key_present is not None:
        pairs = pairs & (tl.load(marks.key_present + b * Lk + cols, mask=cols < Lk, other=0) != 0)
    if extras.allowed is not None:
        allowed = load_pairs(
            extras.allowed, extras.allowed_strides, tile, how.ALLOWED_PER_QUERY, how.ALLOWED_PER_KEY, how
        )
        pairs = pairs & (allowed != 0)
    return pairs


@triton.jit
def kept(seed, pair_head, rows, cols, dropout_p):
    """Which weights dropout keeps: Philox keyed by the seed, its counter the pair itself (key, query, item and head).

    [Salmon et al. 2011, Philox4x32-10.] A pair's draw depends on nothing else, so every kernel and every tile finds the same.
    """
    zero = rows * 0 + cols * 0
    bits, _, _, _ = tl.philox(seed, cols + zero, rows + zero, pair_head + zero, zero)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p
