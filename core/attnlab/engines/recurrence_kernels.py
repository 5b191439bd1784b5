"""The Triton kernels of fast-weight recurrences, and nothing else: this module imports triton. `recurrence_triton` launches them.

`S_t = e^{g_t} S_{t-1} + k_t u_t^T` and what queries read of it, walked in order by one kernel; what later tokens ask of it, walked
backwards by another. Both serve twice, as the transposed memory is the recurrence with keys and u exchanged: the reading of
outputs' gradients is the gradient of queries, and so on. A program has a block of the memory's columns in registers and all chunks
to itself, so nothing is added across programs and the same bits come each time.

u are the values, or `beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)` where writing corrects. In a chunk that begins with the state S they are
`R beta (v - (k e^T) S)`, `R = (1 + beta M)^{-1}`, see `chunked_recurrence`; a kernel of its own makes R for all chunks at once. Backwards,
R^T adds to the gradient of each u of a chunk what the chunk's later corrections pass on to it.

T, the sums of g since a chunk began, come in two float32 parts, the second what the first rounds off: a difference of two is then
as exact as float32 can say it, however far from 0 both are. Exponents are sums between two tokens, 0 or less.

Notation: x item and key head, i tokens of a chunk of C; D rows, E columns of the memory. Sums are in float32, products of float32
as well (no tf32). Offsets that grow with a tensor are 64-bit. What is known of these kernels: in Triton's interpreter they agree with
the float64 loop, and Triton compiles them for sm_80 to sm_120 (`make kernels`). No GPU has run them.
"""

import triton
import triton.language as tl


@triton.jit
def tile(at, rows, columns, row_stride, column_stride, last_row, last_column):
    """In float32, with zeros beyond the tensor's ends; rows [m, 1], columns [1, n], both 64-bit."""
    there = (rows < last_row) & (columns < last_column)
    return tl.load(at + rows * row_stride + columns * column_stride, mask=there, other=0.0).to(tl.float32)


@triton.jit
def product(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def pairs(left, right, t, left_strides, right_strides, length, width, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """[C, C]: left_i . right_j of a chunk's tokens t [C], from [L, width] each; by parts, as threads would hold whole rows otherwise."""
    PART: tl.constexpr = min(WIDTH, 32)
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, WIDTH, PART):
        d = (start + tl.arange(0, PART)).to(tl.int64)
        one = tile(left, t[:, None], d[None, :], left_strides[0], left_strides[1], length, width)
        other = tile(right, d[:, None], t[None, :], right_strides[1], right_strides[0], width, length)
        total += product(one, other)
    return total


@triton.jit
def reading(at, state, t, strides, length, width, CHUNK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr):
    """[C, E]: rows t of [L, width] times the state [D, E], by parts as well."""
    PART: tl.constexpr = min(WIDTH, 32)
    PARTS: tl.constexpr = WIDTH // PART
    if PARTS == 1:
        d = tl.arange(0, WIDTH).to(tl.int64)
        return product(tile(at, t[:, None], d[None, :], strides[0], strides[1], length, width), state)
    d = (tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]).to(tl.int64)
    rows = tile(at, t[None, :, None], d, strides[0], strides[1], length, width)
    return tl.sum(product(rows, tl.reshape(state, [PARTS, PART, BLOCK_E])), axis=0)


@triton.jit
def solve_kernel(
    key, totals, rates, solved, key_strides, heads, length, rows, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """solved, contiguous float32 [B H, chunks, C, C]: R, the inverse of `1 + beta M`, `M_ij = k_i^T e^{T_i - T_j} k_j` for j < i, else 0.

    By substitution, one row after the other. rates, contiguous float32 [B H, chunks C], are beta; the others as in `forward_kernel`.
    Grid (B H chunks,).
    """
    chunks = tl.cdiv(length, CHUNK)
    x, n = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    key_at = key + (x // heads) * key_strides[0] + (x % heads) * key_strides[1]
    i = tl.arange(0, CHUNK)
    t = (n * CHUNK + i).to(tl.int64)
    earlier = i[:, None] < i[None, :]
    inside = pairs(key_at, key_at, t, key_strides[2:], key_strides[2:], length, rows, CHUNK, BLOCK_D)
    if totals is not None:
        total_at = totals + x * 2 * (chunks * CHUNK)
        high = tl.load(total_at + t)
        low = tl.load(total_at + chunks * CHUNK + t)
        apart = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
        inside = inside * tl.exp(tl.where(earlier, apart, 0.0))
    rate = tl.load(rates + x * (chunks * CHUNK) + t)
    # (beta M)^T: what is taken of a column lies among threads as the rows of `inverse` do.
    inside = tl.where(earlier, inside * rate[None, :], 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(i[None, :] == row, inside, 0.0), axis=1)
        known = tl.sum(factors[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == row, known[None, :], 0.0)
    tl.store(solved + ((x * chunks + n) * CHUNK + i[:, None]) * CHUNK + i[None, :], inverse)


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    memory,
    totals,
    rates,
    solved,
    updates,
    out,
    last,
    query_strides,
    key_strides,
    value_strides,
    memory_strides,
    heads,
    groups,
    length,
    rows,
    columns,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out, contiguous float32 [B, H, G, L, E]: query_t^T S_t, and last, contiguous float32 [B, H, D, E]: S_L, of S_0 = memory.

    query [B, H, G, L, D], key [B, H, L, D], value [B, H, L, E] and memory [B, H, D, E] are of any strides; totals, contiguous float32
    [B H, 2, chunks C], are T and what rounding took of it, or None where nothing fades. updates, contiguous float32 [B, H, L, E], are u,
    of beta and R as in `solve_kernel`; these three are None where u is value. last may be None; out is not written where groups, G,
    is 0. Without OWN, k_t u_t^T is not in what is read at t. Grid (B H blocks of E,), those of a head beside each other.
    """
    blocks = tl.cdiv(columns, BLOCK_E)
    x = (tl.program_id(0) // blocks).to(tl.int64)
    item, head = x // heads, x % heads
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    i = tl.arange(0, CHUNK)
    earlier = (i[None, :] <= i[:, None]) if OWN else (i[None, :] < i[:, None])
    chunks = tl.cdiv(length, CHUNK)
    key_at = key + item * key_strides[0] + head * key_strides[1]
    value_at = value + item * value_strides[0] + head * value_strides[1]
    memory_at = memory + item * memory_strides[0] + head * memory_strides[1]
    state = tile(memory_at, d[:, None], e, memory_strides[2], memory_strides[3], rows, columns)
    for n in range(chunks):
        t = (n * CHUNK + i).to(tl.int64)
        k = tile(key_at, d[:, None], t[None, :], key_strides[3], key_strides[2], rows, length)  # [D, C]
        v = tile(value_at, t[:, None], e, value_strides[2], value_strides[3], length, columns)  # [C, E]
        if totals is not None:
            total_at = totals + x * 2 * (chunks * CHUNK)
            high = tl.load(total_at + t)
            low = tl.load(total_at + chunks * CHUNK + t)
        if solved is not None:
            held = reading(key_at, state, t, key_strides[2:], length, rows, CHUNK, BLOCK_D, BLOCK_E)
            if totals is not None:
                held = held * tl.exp(high + low)[:, None]
            rate = tl.load(rates + x * (chunks * CHUNK) + t)
            r = tl.load(solved + ((x * chunks + n) * CHUNK + i[:, None]) * CHUNK + i[None, :])
            v = product(r, rate[:, None] * (v - held))
            to = (x * length + t[:, None]) * columns + e
            tl.store(updates + to, v, mask=(t[:, None] < length) & (e < columns))
        if out is not None:
            q_at = query + item * query_strides[0] + head * query_strides[1]
            out_at = out + (x * groups * length + t[:, None]) * columns + e
            for _ in range(groups):
                inside = pairs(q_at, key_at, t, query_strides[3:], key_strides[2:], length, rows, CHUNK, BLOCK_D)
                read = reading(q_at, state, t, query_strides[3:], length, rows, CHUNK, BLOCK_D, BLOCK_E)
                if totals is not None:
                    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
                    inside = inside * tl.exp(tl.where(earlier, apart, 0.0))
                    read = read * tl.exp(high + low)[:, None]
                read += product(tl.where(earlier, inside, 0.0), v)
                tl.store(out_at, read, mask=(t[:, None] < length) & (e < columns))
                q_at += query_strides[2]
                out_at += length.to(tl.int64) * columns
        if totals is not None:
            end_high = tl.load(total_at + n * CHUNK + (CHUNK - 1))
            end_low = tl.load(total_at + (chunks + n) * CHUNK + (CHUNK - 1))
            k = k * tl.exp((end_high - high) + (end_low - low))[None, :]
            state = state * tl.exp(end_high + end_low)
        state += product(k, v)
    if last is not None:
        to = (x * rows + d[:, None]) * columns + e
        tl.store(last + to, state, mask=(d[:, None] < rows) & (e < columns))


@triton.jit
def backward_kernel(
    query,
    key,
    value,
    memory,
    totals,
    rates,
    solved,
    out,
    first,
    query_strides,
    key_strides,
    value_strides,
    memory_strides,
    heads,
    groups,
    length,
    rows,
    columns,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out, contiguous float32 [B, H, L, E]: query_t^T A_t, and first, contiguous float32 [B, H, D, E]: e^{g_1} A_1; first may be None.

    A_t = e^{g_{t+1}} A_{t+1} + sum over the group of key_t value_t^T, without its e for the last token, where memory stands in
    [B, H, D, E], or zeros for None. query [B, H, L, D], key [B, H, G, L, D] and value [B, H, G, L, E]: this time the group is on the
    side that writes. Given R and beta, A_t - beta_t query_t out_t^T takes A_t's place in e^{g_t} A_t. Else as `forward_kernel`.
    """
    blocks = tl.cdiv(columns, BLOCK_E)
    x = (tl.program_id(0) // blocks).to(tl.int64)
    item, head = x // heads, x % heads
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    i = tl.arange(0, CHUNK)
    later = (i[None, :] >= i[:, None]) if OWN else (i[None, :] > i[:, None])
    chunks = tl.cdiv(length, CHUNK)
    query_at = query + item * query_strides[0] + head * query_strides[1]
    if memory is not None:
        memory_at = memory + item * memory_strides[0] + head * memory_strides[1]
        state = tile(memory_at, d[:, None], e, memory_strides[2], memory_strides[3], rows, columns)
    else:
        state = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    for step in range(chunks):
        n = chunks - 1 - step
        t = (n * CHUNK + i).to(tl.int64)
        read = reading(query_at, state, t, query_strides[2:], length, rows, CHUNK, BLOCK_D, BLOCK_E)
        if totals is not None:
            total_at = totals + x * 2 * (chunks * CHUNK)
            high = tl.load(total_at + t)
            low = tl.load(total_at + chunks * CHUNK + t)
            end_high = tl.load(total_at + n * CHUNK + (CHUNK - 1))
            end_low = tl.load(total_at + (chunks + n) * CHUNK + (CHUNK - 1))
            read = read * tl.exp((end_high - high) + (end_low - low))[:, None]
            state = state * tl.exp(end_high + end_low)
        if key is not None:
            k_at = key + item * key_strides[0] + head * key_strides[1]
            v_at = value + item * value_strides[0] + head * value_strides[1]
            for _ in range(groups):
                k = tile(k_at, d[:, None], t[None, :], key_strides[4], key_strides[3], rows, length)  # [D, C]
                v = tile(v_at, t[:, None], e, value_strides[3], value_strides[4], length, columns)  # [C, E]
                inside = pairs(query_at, k_at, t, query_strides[2:], key_strides[3:], length, rows, CHUNK, BLOCK_D)
                if totals is not None:
                    apart = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
                    inside = inside * tl.exp(tl.where(later, apart, 0.0))
                    k = k * tl.exp(high + low)[None, :]
                read += product(tl.where(later, inside, 0.0), v)
                state += product(k, v)
                k_at += key_strides[2]
                v_at += value_strides[2]
        if solved is not None:
            r = tl.load(solved + ((x * chunks + n) * CHUNK + i[None, :]) * CHUNK + i[:, None])  # R^T
            read = product(r, read)
            rate = tl.load(rates + x * (chunks * CHUNK) + t)
            k = tile(query_at, d[:, None], t[None, :], query_strides[3], query_strides[2], rows, length)
            if totals is not None:
                k = k * tl.exp(high + low)[None, :]
            state -= product(k, rate[:, None] * read)
        to = (x * length + t[:, None]) * columns + e
        tl.store(out + to, read, mask=(t[:, None] < length) & (e < columns))
    if first is not None:
        to = (x * rows + d[:, None]) * columns + e
        tl.store(first + to, state, mask=(d[:, None] < rows) & (e < columns))
