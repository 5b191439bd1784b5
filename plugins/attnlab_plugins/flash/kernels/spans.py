"""Which keys a block of queries can see at all, and the reverse: whole blocks outside are never visited. Needs triton.

Spans are half-open ranges of rows of the other side. Inside a span the *interior* is where every pair of a tile is visible
by its place alone, so that nothing is compared. Notation: a hull is an item's five int32: first and last + 1 present key,
first and last + 1 present query, and whether all keys between are present.
"""

import triton
import triton.language as tl


@triton.jit
def item_bounds(b, low, high, how: tl.constexpr):
    """(low, high) of an item: what is added to a query's index for the least and greatest position it sees; 0 without a bound."""
    least = b.to(tl.int32) * 0
    greatest = least
    if low is not None and how.BOUNDS != "query":
        if how.BOUNDS == "item":
            least = tl.load(low + b)
        else:
            least = least + low
    if high is not None and how.BOUNDS != "query":
        if how.BOUNDS == "item":
            greatest = tl.load(high + b)
        else:
            greatest = greatest + high
    return least, greatest


@triton.jit
def key_span(first, b, block, blocks, Lq, Lk, low, high, marks, COMPARED: tl.constexpr, how: tl.constexpr):
    """(start, inner, outer, stop) for a block of queries: tiles of keys in [inner, outer) need no comparison.

    COMPARED: every pair is looked at anyway, there is no interior.
    """
    end = tl.minimum(first + how.BLOCK_M, Lq)
    least, greatest = item_bounds(b, low, high, how)
    hull = marks.hull
    if hull is not None:
        hull += b * 5
    start = first * 0
    stop = start + Lk
    if marks.spans is not None:
        start = tl.load(marks.spans + (b * blocks + block) * 2)
        stop = tl.load(marks.spans + (b * blocks + block) * 2 + 1)
    else:
        if low is not None:
            start = tl.maximum(start, first + least)
        if high is not None:
            stop = tl.minimum(stop, end + greatest)
        if hull is not None:
            start = tl.maximum(start, tl.load(hull))
            stop = tl.minimum(stop, tl.load(hull + 1))
            unseen = (end <= tl.load(hull + 2)) | (first >= tl.load(hull + 3))
            stop = tl.where(unseen, start, stop)
    start = tl.maximum(start, 0) // how.BLOCK_N * how.BLOCK_N
    inner = start
    outer = start
    if not COMPARED:
        outer = start * 0 + Lk
        if low is not None:
            inner = tl.maximum(inner, end - 1 + least)
        if high is not None:
            outer = tl.minimum(outer, first + greatest + 1)
        if hull is not None:
            inner = tl.maximum(inner, tl.load(hull))
            outer = tl.minimum(outer, tl.where(tl.load(hull + 4) != 0, tl.load(hull + 1), 0))
        inner = tl.cdiv(inner, how.BLOCK_N) * how.BLOCK_N
        outer = tl.maximum(outer, 0) // how.BLOCK_N * how.BLOCK_N
    return start, inner, outer, stop


@triton.jit
def query_span(first, b, block, blocks, Lq, Lk, low, high, marks, COMPARED: tl.constexpr, how: tl.constexpr):
    """`key_span` for a block of keys: the queries that could see one of them, and those that see all of them."""
    end = tl.minimum(first + how.BLOCK_N, Lk)
    least, greatest = item_bounds(b, low, high, how)
    hull = marks.hull
    if hull is not None:
        hull += b * 5
    start = first * 0
    stop = start + Lq
    if marks.spans is not None:
        start = tl.load(marks.spans + (b * blocks + block) * 2)
        stop = tl.load(marks.spans + (b * blocks + block) * 2 + 1)
    else:
        if high is not None:
            start = tl.maximum(start, first - greatest)
        if low is not None:
            stop = tl.minimum(stop, end - least)
        if hull is not None:
            start = tl.maximum(start, tl.load(hull + 2))
            stop = tl.minimum(stop, tl.load(hull + 3))
            unseen = (end <= tl.load(hull)) | (first >= tl.load(hull + 1))
            stop = tl.where(unseen, start, stop)
    start = tl.maximum(start, 0) // how.BLOCK_M * how.BLOCK_M
    inner = start
    outer = start
    if not COMPARED:
        # Queries past the last need no comparison, their lse of +inf makes every weight 0; keys past the last do.
        outer = tl.where(first + how.BLOCK_N > Lk, 0, tl.cdiv(start * 0 + Lq, how.BLOCK_M) * how.BLOCK_M)
        if high is not None:
            inner = tl.maximum(inner, end - 1 - greatest)
        if low is not None:
            outer = tl.minimum(outer, first - least + 1)
        if hull is not None:
            whole = (tl.load(hull + 4) != 0) & (first >= tl.load(hull)) & (end <= tl.load(hull + 1))
            outer = tl.where(whole, outer, 0)
        inner = tl.cdiv(inner, how.BLOCK_M) * how.BLOCK_M
        outer = tl.maximum(outer, 0) // how.BLOCK_M * how.BLOCK_M
    return start, inner, outer, stop


@triton.jit(do_not_specialize=["Lq", "Lk"])
def hull_kernel(key_present, query_present, hull, Lq, Lk, BLOCK: tl.constexpr):
    """The hull of each item, int32 [B, 5]; present are uint8 [B, L] or None (all); grid (B,)."""
    item = tl.program_id(0)
    at = hull + item * 5
    solid = 1
    for side in tl.static_range(2):
        if side == 0:
            present = key_present
            length = Lk
        else:
            present = query_present
            length = Lq
        if present is None:
            tl.store(at + 2 * side, 0)
            tl.store(at + 2 * side + 1, length)
        else:
            base = present + item.to(tl.int64) * length
            least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
            most = tl.zeros([BLOCK], tl.int32)
            count = tl.zeros([BLOCK], tl.int32)
            for start in tl.range(0, length, BLOCK):
                i = start + tl.arange(0, BLOCK)
                there = tl.load(base + i, mask=i < length, other=0) != 0
                least = tl.minimum(least, tl.where(there, i, 0x7FFFFFFF))
                most = tl.maximum(most, tl.where(there, i + 1, 0))
                count += there.to(tl.int32)
            last = tl.max(most, 0)
            begin = tl.minimum(tl.min(least, 0), last)
            tl.store(at + 2 * side, begin)
            tl.store(at + 2 * side + 1, last)
            if side == 0:
                solid = (tl.sum(count, 0) == last - begin).to(tl.int32)
    tl.store(at + 4, solid)


@triton.jit(do_not_specialize=["length"])
def summary_kernel(segments, lows, highs, summary, length, BLOCK: tl.constexpr):
    """Of each block of tokens: least and greatest id, least of `lows`, greatest of `highs`; int64 [B, blocks, 4].

    Absent tokens (ids below 0) do not count; a block of them has its least above its greatest. Grid (B * blocks,).
    """
    blocks = tl.cdiv(length, BLOCK)
    item = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    i = block * BLOCK + tl.arange(0, BLOCK)
    base = item.to(tl.int64) * length
    ids = tl.load(segments + base + i, mask=i < length, other=-1)
    there = ids >= 0
    most: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    at = summary + tl.program_id(0).to(tl.int64) * 4
    tl.store(at, tl.min(tl.where(there, ids, most), 0))
    tl.store(at + 1, tl.max(tl.where(there, ids, -most), 0))
    low = tl.full([], 0, tl.int64)
    if lows is not None:
        low = tl.min(tl.where(there, tl.load(lows + base + i, mask=i < length, other=0).to(tl.int64), most), 0)
    tl.store(at + 2, low)
    high = tl.full([], 0, tl.int64)
    if highs is not None:
        high = tl.max(tl.where(there, tl.load(highs + base + i, mask=i < length, other=0).to(tl.int64), -most), 0)
    tl.store(at + 3, high)


@triton.jit(do_not_specialize=["blocks", "others", "length"])
def span_kernel(
    mine,
    theirs,
    spans,
    blocks,
    others,
    length,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each block of one side the range of rows of the other side's blocks that it may share a pair with; int32 [B, blocks, 2].

    Both sides hold `summary_kernel`'s numbers. A pair needs ids in common, and where LOW (HIGH) is set its sides' bounds to
    meet: my greatest at or above their least (my least at or below their greatest). The range is that of the outermost
    blocks, so ids that lie in disorder cost time and nothing else. blocks, others: of an item, mine and theirs. Grid (B * blocks,).
    """
    program = tl.program_id(0).to(tl.int64)
    item = program // blocks
    at = mine + program * 4
    id_least = tl.load(at)
    id_most = tl.load(at + 1)
    low = tl.load(at + 2)
    high = tl.load(at + 3)
    least = tl.full([CHUNK], 0x7FFFFFFF, tl.int32)
    most = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, others, CHUNK):
        n = start + tl.arange(0, CHUNK)
        other = theirs + (item * others + n) * 4
        keep = n < others
        meets = keep & (tl.load(other, mask=keep, other=1) <= id_most)
        meets = meets & (tl.load(other + 1, mask=keep, other=-1) >= id_least)
        if LOW:
            meets = meets & (tl.load(other + 3, mask=keep, other=0) >= low)
        if HIGH:
            meets = meets & (tl.load(other + 2, mask=keep, other=0) <= high)
        least = tl.minimum(least, tl.where(meets, n, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(meets, n + 1, 0))
    stop = tl.max(most, 0)
    begin = tl.minimum(tl.min(least, 0), stop)
    out = spans + program * 2
    tl.store(out, begin * BLOCK)
    tl.store(out + 1, tl.minimum(stop * BLOCK, length))
