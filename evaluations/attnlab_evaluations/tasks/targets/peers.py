"""What users could pick instead, as plain functions to be timed beside attnlab. Needs torch.

Layout `[B, H, L, D]`. Written for these comparisons from the formulas; no peer's code is used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """torch's own `scaled_dot_product_attention`; mask bool, True = may attend."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


def chunked_linear(query: Tensor, key: Tensor, value: Tensor, *, chunk: int = 128) -> Tensor:
    """Causal linear attention with `elu(x) + 1` (Katharopoulos 2020, eq. 9-12), three products a chunk.

    `phi(q)_i^T S_i / (phi(q)_i^T z_i)`. The normaliser rides along as a last column of ones in value, so each
    chunk costs exactly: keys x values, queries x state, and the masked square. Lengths that `chunk` does
    not divide are padded with keys of weight 0.
    """
    batch, heads, length, _ = query.shape
    q, k = F.elu(query) + 1, F.elu(key) + 1
    v = F.pad(value, (0, 1), value=1.0)  # [B, H, L, E + 1]
    short = -length % chunk
    if short:
        q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
    q, k, v = (x.reshape(batch, heads, -1, chunk, x.shape[-1]) for x in (q, k, v))  # [B, H, N, C, .]
    added = k.transpose(-1, -2) @ v  # [B, H, N, D, E + 1]
    before = added.cumsum(dim=2) - added  # the state ahead of each chunk
    inside = (q @ k.transpose(-1, -2)).tril_()  # [B, H, N, C, C]
    both = q @ before + inside @ v
    out = both[..., :-1] / both[..., -1:]
    return out.reshape(batch, heads, length + short, -1)[:, :, :length]


def chunked_delta(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, chunk: int = 32) -> Tensor:
    """The delta rule in chunks as its authors publish it (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule").

    `(1 + tril(beta K K^T, -1))^-1` row by row, then one state between chunks. beta `[B, H, L]`; `chunk` must divide L. No scale.
    """
    q, k, v, b = (
        x.unflatten(2, (-1, chunk))  # type: ignore[no-untyped-call]
        for x in (query, key, value, beta[..., None])
    )
    written = k * b
    inverse = -(written @ k.transpose(-1, -2)).tril(-1)  # [B, H, N, C, C]
    for i in range(1, chunk):
        row = inverse[..., i, :i].clone()
        inverse[..., i, :i] = row + (row[..., None] * inverse[..., :i, :i]).sum(-2)
    inverse = inverse + torch.eye(chunk, dtype=query.dtype, device=query.device)
    request, new = inverse @ written, inverse @ (v * b)
    state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    out = torch.zeros_like(v)
    for n in range(k.shape[2]):
        inside = (q[:, :, n] @ k[:, :, n].transpose(-1, -2)).tril()
        u = new[:, :, n] - request[:, :, n] @ state
        out[:, :, n] = q[:, :, n] @ state + inside @ u
        state = state + k[:, :, n].transpose(-1, -2) @ u
    return out.flatten(2, 3)


def recurrent_delta(query: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """The delta rule token by token (Schlag et al. 2021, eq. 24), unscaled; beta `[B, H, L]`."""
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    out = torch.empty_like(value)
    for t in range(key.shape[2]):
        k = key[:, :, t, :, None]
        error = value[:, :, t] - (state * k).sum(-2)
        state = state + k * (beta[:, :, t, None] * error)[..., None, :]
        out[:, :, t] = (state * query[:, :, t, :, None]).sum(-2)
    return out


def plain_softmax(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> Tensor:
    """The textbook formula, holding the whole square."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value
