"""Sums of feature maps: `o_i = phi(q_i)^T S_i / phi(q_i)^T z_i`, chunked where causal. Needs torch.

Notation: P features, C chunk length, N chunks, G query heads a key/value head. `S_i = sum phi(k_j) v_j^T` and
`z_i = sum phi(k_j)` over the keys that query i sees. [Katharopoulos et al. 2020; the chunked form: Hua et al. 2022]
Everything is computed in float32 or better; callers cast.

The causal form is a recurrence without decays, so where Triton kernels serve those of `chunked_recurrence` (float32 on CUDA, P and
Dv + 1 up to 256, outside traces and transforms) they serve this one, but for steps of one token. No GPU has run them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlab._lengths import chunks_of, first_of, in_chunks
from attnlab.engines.chunked_recurrence import chunked_recurrence, served_by_kernels
from attnlab.engines.heads import fold_groups
from attnlab.engines.recurrence_triton import WIDEST

CHUNK = 64
BLOCK = 512  # tokens whose features, sums and products fit a second-level cache at 64 features


def read_sums(query: Tensor, kv: Tensor, z: Tensor, normalise: bool = True, least: float = 0.0) -> Tensor:
    """What features `query [B, Hq, Lq, P]` read from sums `kv [B, Hkv, P, Dv]`, `z [B, Hkv, P]`; `[B, Hq, Lq, Dv]`."""
    grouped = fold_groups(query, kv.shape[1])  # [B, Hkv, G, Lq, P]
    out = (grouped @ kv[:, :, None]).flatten(1, 2)
    if not normalise:
        return out
    total = (grouped @ z[:, :, None, :, None]).flatten(1, 2)  # [B, Hq, Lq, 1]
    return divided(out, total, least)


def divided(out: Tensor, total: Tensor, least: float = 0.0) -> Tensor:
    """`out / max(total, least)`; without a least total `out / total`, or `out` where total is 0 or nearly underflows: next to nothing was summed, so out is next to 0 as well.

    The bound leaves the gradient's `1 / total` room for factors of 10^5 below overflow; at such totals features are denormal.
    """
    if least:
        return out / total.clamp(min=least)
    nearly = torch.finfo(total.dtype).tiny * 2**16
    return out / total.masked_fill(total.abs() < nearly, 1)


def align_to_queries(
    key: Tensor, value: Tensor, offset: int | Tensor, query_length: int, kv: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys moved so that query i sees keys 0..i: `(key', value', S0, z0)`, both `[B, Hkv, Lq, *]`.

    Query i stands at `i + offset`. Keys before position `offset` are visible to all queries and go into the initial sums
    (added to `kv`, `z` unless None); keys past the last query are visible to none. Padded keys hold zero features.
    """
    lk = key.shape[2]
    if not isinstance(offset, Tensor):  # an int, or a symbolic one while torch.export traces
        if offset == 0 and lk == query_length:
            return key, value, kv, z
        head = min(max(offset, 0), lk)
        if head:
            before_k, before_v = key[:, :, :head], value[:, :, :head]
            kv = _plus(kv, before_k.transpose(-1, -2) @ before_v)
            z = _plus(z, before_k.sum(-2))
        start, stop = max(offset, 0), max(min(offset + query_length, lk), max(offset, 0))
        left = min(max(-offset, 0), query_length)
        right = query_length - left - (min(stop, lk) - min(start, lk))
        parts = [
            torch.nn.functional.pad(t[:, :, min(start, lk) : min(stop, lk)], (0, 0, left, right)) for t in (key, value)
        ]
        return parts[0], parts[1], kv, z
    places = torch.arange(lk, device=key.device)
    first = (places < offset[:, None])[:, None, :, None]  # [B, 1, Lk, 1]
    early = key.masked_fill(~first, 0)
    kv, z = _plus(kv, early.transpose(-1, -2) @ value), _plus(z, early.sum(-2))
    source = torch.arange(query_length, device=key.device) + offset[:, None]  # [B, Lq]
    inside = ((source >= 0) & (source < lk))[:, None, :, None]
    index = source.clamp(0, max(lk - 1, 0))[:, None, :, None]
    moved = [t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3])).masked_fill(~inside, 0) for t in (key, value)]
    return moved[0], moved[1], kv, z


def causal_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    *,
    normalise: bool = True,
    least: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Query i sees keys 0..i and the initial sums: `[B, Hq, L, Dv]` from features of one length L.

    Triton kernels have chunks of their own.
    """

    def block(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]

    return causal_linear_blocks(block, key.shape[2], kv, z, normalise=normalise, least=least, chunk=chunk)[0]


def causal_linear_blocks(
    block: Callable[[int, int], tuple[Tensor, Tensor, Tensor]],
    length: int,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    *,
    normalise: bool = True,
    least: float = 0.0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query i sees keys 0..i and the initial sums: `(out [B, Hq, L, Dv], S_L, z_L)`.

    `block(start, stop)` gives the features of those tokens, query `[B, Hq, n, P]`, key `[B, Hkv, n, P]`, and their values: so
    a block's features are made, used and dropped while the cache holds them. Inside a block all chunks go at once: inside a
    chunk the masked product, before it the sums so far. `O(L C (P + Dv) + L P Dv)` work, `O(L Dv)` memory beyond a block.
    Triton kernels take what follows the first block as one, whose features are there at once: a launch costs more than a cache saves.
    """
    outs = []
    # One block in a graph: a loop would tie it to a number of blocks.
    blocks = 1 if torch.compiler.is_compiling() else -(-length // BLOCK)
    by_kernels = False
    for i in range(blocks):
        last = by_kernels or i == blocks - 1
        query, key, value = block(i * BLOCK, length if last else (i + 1) * BLOCK)
        if kv is None or z is None:
            kv = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
            z = key.new_zeros(*key.shape[:2], key.shape[3])
        by_kernels = _are_served(query, key, value, kv, z, normalise)
        if by_kernels:
            out, kv, z = _by_recurrence(query, key, value, kv, z, normalise, least)
        else:
            out, kv, z = _one_block(query, key, value, kv, z, normalise, least, chunk)
        outs.append(out)
        if last:
            break
    assert kv is not None
    assert z is not None
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)), kv, z


def _are_served(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor, normalise: bool) -> bool:
    """Whether `_by_recurrence` has kernels for these; a step of one token is a few small products in any case."""
    columns = value.shape[3] + normalise
    return key.shape[2] > 1 and columns <= WIDEST and served_by_kernels(kv, z, query, key, value)


def _by_recurrence(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor, normalise: bool, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_one_block` as the recurrence that it is, the normaliser being what it reads of a last column of values 1.

    Not a recurrence of its own: what a query passes to a key through the two nearly cancels where it meets few features, which costs
    least while both are one number for a pair, before anything is summed.
    """
    grouped = fold_groups(query, key.shape[1])  # [B, Hkv, G, L, P]
    if not normalise:
        out, kv = chunked_recurrence(kv, grouped, key, value)
        assert out is not None
        return out.flatten(1, 2), kv, z + key.sum(-2)
    memory = torch.cat([kv, z[..., None]], -1)  # [B, Hkv, P, Dv + 1]
    both, memory = chunked_recurrence(memory, grouped, key, torch.nn.functional.pad(value, (0, 1), value=1.0))
    assert both is not None
    out = divided(both[..., :-1], both[..., -1:], least).flatten(1, 2)  # [B, Hq, L, Dv]
    return out, memory[..., :-1].contiguous(), memory[..., -1].contiguous()


def _one_block(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, z: Tensor, normalise: bool, least: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, length = key.shape[1], key.shape[2]
    n, c = chunks_of(length, chunk)
    q = in_chunks(fold_groups(query, kv_heads), 3, n, c)  # [B, Hkv, G, N, C, P]
    k = in_chunks(key, 2, n, c)  # [B, Hkv, N, C, P]
    # Contiguous, as each product would copy it else.
    v = in_chunks(value.contiguous(), 2, n, c)  # [B, Hkv, N, C, Dv]
    added = k.transpose(-1, -2) @ v  # [B, Hkv, N, P, Dv]
    sums = torch.cat([kv[:, :, None], added], 2).cumsum(2)  # [B, Hkv, N + 1, P, Dv]: before each chunk, and after all
    inner = (q @ k[:, :, None].transpose(-1, -2)).tril_()  # [B, Hkv, G, N, C, C]
    out = (inner @ v[:, :, None]).add_(q @ sums[:, :, None, :-1])  # [B, Hkv, G, N, C, Dv]
    tokens = torch.cat([z[:, :, None], k.sum(-2)], 2).cumsum(2)  # [B, Hkv, N + 1, P]
    if normalise:
        out = divided(out, inner.sum(-1, keepdim=True).add_(q @ tokens[:, :, None, :-1, :, None]), least)
    whole: Tensor = out.flatten(3, 4).flatten(1, 2)  # [B, Hq, N C, Dv]
    return first_of(whole, 2, length), sums[:, :, -1], tokens[:, :, -1]


def _plus(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else old + new
