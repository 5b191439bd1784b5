"""Sums of feature maps: `o_i = phi(q_i)^T S_i / phi(q_i)^T z_i`, chunked where causal. Needs torch.

Notation: P features, C chunk length, N chunks, G query heads a key/value head. `S_i = sum phi(k_j) v_j^T` and
`z_i = sum phi(k_j)` over the keys that query i sees. [Katharopoulos et al. 2020; the chunked form: Hua et al. 2022]
Everything is computed in float32 or better; callers cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.engines.heads import fold_groups

CHUNK = 128


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, normalise: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Every query sees every key: `(out [B, Hq, Lq, Dv], S [B, Hkv, P, Dv], z [B, Hkv, P])` from features `[B, H, L, P]`."""
    kv = key.transpose(-1, -2) @ value  # [B, Hkv, P, Dv]
    z = key.sum(-2)  # [B, Hkv, P]
    return read(query, kv, z, normalise), kv, z


def read(query: Tensor, kv: Tensor, z: Tensor, normalise: bool = True) -> Tensor:
    """What features `query [B, Hq, Lq, P]` read from sums `kv [B, Hkv, P, Dv]`, `z [B, Hkv, P]`; `[B, Hq, Lq, Dv]`."""
    grouped = fold_groups(query, kv.shape[1])  # [B, Hkv, G, Lq, P]
    out = (grouped @ kv[:, :, None]).flatten(1, 2)
    if not normalise:
        return out
    total = (grouped @ z[:, :, None, :, None]).flatten(1, 2)  # [B, Hq, Lq, 1]
    return divided(out, total)


def divided(out: Tensor, total: Tensor) -> Tensor:
    """`out / total`, and 0 where total is exactly 0: a row that sees nothing, or only zero features."""
    empty = total == 0
    return torch.where(empty, torch.zeros_like(out), out / torch.where(empty, torch.ones_like(total), total))


def align_to_queries(
    key: Tensor, value: Tensor, offset: int | Tensor, query_length: int, kv: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys moved so that query i sees keys 0..i: `(key', value', S0, z0)`, both `[B, Hkv, Lq, *]`.

    Query i stands at `i + offset`. Keys before position `offset` are seen by all queries and go into the initial sums
    (added to `kv`, `z` where given); keys past the last query are seen by none. Absent keys hold zero features.
    """
    lk = key.shape[2]
    if isinstance(offset, int):
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
            torch.nn.functional.pad(t[:, :, min(start, lk) : min(stop, lk)], (0, 0, left, right))
            for t in (key, value)
        ]
        return parts[0], parts[1], kv, z
    places = torch.arange(lk, device=key.device)
    first = (places < offset[:, None])[:, None, :, None]  # [B, 1, Lk, 1]
    early = key.masked_fill(~first, 0)
    kv, z = _plus(kv, early.transpose(-1, -2) @ value), _plus(z, early.sum(-2))
    source = torch.arange(query_length, device=key.device) + offset[:, None]  # [B, Lq]
    inside = ((source >= 0) & (source < lk))[:, None, :, None]
    index = source.clamp(0, max(lk - 1, 0))[:, None, :, None]
    moved = [
        t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3])).masked_fill(~inside, 0)
        for t in (key, value)
    ]
    return moved[0], moved[1], kv, z


def causal_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: Tensor | None = None,
    z: Tensor | None = None,
    *,
    normalise: bool = True,
    chunk: int = CHUNK,
) -> Tensor:
    """Query i sees keys 0..i and the initial sums: `[B, Hq, L, Dv]` from features of one length L.

    Chunks of `chunk` tokens: inside one, the masked product; before it, the sums so far. `O(L C (P + Dv) + L P Dv)` work.
    """
    batch, kv_heads, length, features = key.shape
    width = value.shape[3]
    c = min(chunk, length)
    pad = -length % c
    if pad:
        query, key, value = (torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (query, key, value))
    n = (length + pad) // c
    q = fold_groups(query, kv_heads).reshape(batch, kv_heads, -1, n, c, features)  # [B, Hkv, G, N, C, P]
    k = key.reshape(batch, kv_heads, n, c, features)  # [B, Hkv, N, C, P]
    v = value.reshape(batch, kv_heads, n, c, width)  # [B, Hkv, N, C, Dv]
    sums = k.transpose(-1, -2) @ v  # [B, Hkv, N, P, Dv]: each chunk's own
    tokens = k.sum(-2)  # [B, Hkv, N, P]
    before_kv = _exclusive(sums, kv)  # [B, Hkv, N, P, Dv]
    before_z = _exclusive(tokens, z)
    inner = (q @ k[:, :, None].transpose(-1, -2)).tril()  # [B, Hkv, G, N, C, C]
    out = inner @ v[:, :, None] + q @ before_kv[:, :, None]  # [B, Hkv, G, N, C, Dv]
    if normalise:
        total = inner.sum(-1, keepdim=True) + q @ before_z[:, :, None, ..., None]  # [B, Hkv, G, N, C, 1]
        out = divided(out, total)
    whole: Tensor = out.flatten(3, 4).flatten(1, 2)  # [B, Hq, N C, Dv]
    return whole[:, :, :length] if pad else whole


def _exclusive(parts: Tensor, initial: Tensor | None) -> Tensor:
    """Prefix sums over the chunk axis (2) that leave out the chunk itself, started at `initial`."""
    start = torch.zeros_like(parts[:, :, :1]) if initial is None else initial[:, :, None]
    return torch.cat([start, parts[:, :, :-1]], 2).cumsum(2)


def _plus(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else old + new
