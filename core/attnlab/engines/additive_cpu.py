"""The additive score of a tile and its gradients in plain torch, in temporaries of a bounded size. Needs torch; see `additive`.

Small tiles are worked on for many heads at once, large ones channel by channel: for each an addition and a fused
multiply-divide over `[tq, tk]`, which is as few passes as torch has functions for. Backward `u / (u + e)` is a sigmoid, of
`-2 (q + k)`, whose derivative torch multiplies with g in place.

Notation: N heads of all items; tq, tk sides of the tile; A channels; g gradient of the scores; u = exp(-2 q), e = exp(2 k).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the temporaries `[n, tq, A, tk]`: 4 MiB of float32. Less would fit nearer caches and cost more in calls.
BLOCK_ELEMENTS = 1 << 20
# Powers up to exp(2 REACH) and sums of two must be far from the largest float32; float64 could go further and has no need.
REACH = 20.0


def forward(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    """`[B, H, tq, tk]` of `query [B, H, tq, A]`, `key [B, H, tk, A]` and `v [H, A]`, all of one dtype."""
    q, k, w = _flat(query, key, v)
    scores = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    near = _within_reach(q, k)
    if step := _heads_together(q, k):
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            scores[at] = _together(q[at], k[at], w[at], near)
    else:
        tile = torch.empty_like(scores[0])  # once, as the system clears what is new page by page
        for n in range(q.shape[0]):
            _by_channel(q[n], k[n], w[n], near, tile, scores[n])
    return scores.view(*query.shape[:3], key.shape[2])


def backward(grad: Tensor, query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and v for `grad [B, H, tq, tk]` of the scores."""
    q, k, w = _flat(query, key, v)
    g = grad.reshape(q.shape[0], q.shape[1], k.shape[1])
    of_query, of_key, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    near = _within_reach(q, k)
    if step := _heads_together(q, k):
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            of_query[at], of_key[at], of_v[at] = _together_backward(g[at], q[at], k[at], w[at], near)
    else:
        tile = g.new_empty(g.shape[1:])
        for n in range(q.shape[0]):
            of_query[n], of_key[n], of_v[n] = _by_channel_backward(g[n], q[n], k[n], w[n], near, tile)
    return of_query.view(query.shape), of_key.view(key.shape), of_v.view(-1, *v.shape).sum(0)


def _flat(query: Tensor, key: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[N, tq, A]`, `[N, tk, A]` and `[N, A]`."""
    batch = query.shape[0]
    return query.flatten(0, 1), key.flatten(0, 1), v.expand(batch, *v.shape).flatten(0, 1)


def _within_reach(*tensors: Tensor) -> bool:
    return all(x.numel() == 0 or bool(x.abs().amax() <= REACH) for x in tensors)  # False for NaN


def _heads_together(q: Tensor, k: Tensor) -> int:
    """How many heads fit a block; 0 where not one does."""
    return int(BLOCK_ELEMENTS // max(q.shape[1] * k.shape[1] * q.shape[2], 1))


def _together(q: Tensor, k: Tensor, w: Tensor, near: bool) -> Tensor:
    """`[n, tq, tk]` of `q [n, tq, A]`, `k [n, tk, A]`, `w [n, A]`."""
    lead = w[:, None].expand(q.shape)
    if not near:
        inside = (q[..., None] + k.transpose(1, 2)[:, None]).tanh_()  # [n, tq, A, tk]
        return (lead[:, :, None] @ inside)[:, :, 0]
    u, e = torch.exp(-2 * q), torch.exp(2 * k)
    inside = (u[..., None] + e.transpose(1, 2)[:, None]).reciprocal_()
    return ((-2 * lead * u)[:, :, None] @ inside)[:, :, 0] + w.sum(1)[:, None, None]


def _together_backward(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, near: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gs = g[:, :, None]  # [n, tq, 1, tk]
    if near:  # u / (u + e) is sigmoid(-2 (q + k)), whose derivative is that times the rest to 1
        u, e = torch.exp(-2 * q), torch.exp(2 * k)
        inside = (u[..., None] + e.transpose(1, 2)[:, None]).reciprocal_().mul_(u[..., None])
    else:
        inside = (q[..., None] + k.transpose(1, 2)[:, None]).tanh_()
    summed = (gs @ inside.transpose(2, 3)).sum((1, 2))  # [n, A]
    if near:
        inside.addcmul_(inside, inside, value=-1)
    else:
        inside.square_().neg_().add_(1)
    inside.mul_(gs)
    lead = (4 * w if near else w)[:, None]
    of_v = g.sum((1, 2))[:, None] - 2 * summed if near else summed
    return inside.sum(3) * lead, inside.sum(1).transpose(1, 2) * lead, of_v


def _by_channel(q: Tensor, k: Tensor, w: Tensor, near: bool, tile: Tensor, scores: Tensor) -> None:
    """Writes `scores [tq, tk]` of one head: `q [tq, A]`, `k [tk, A]`, `w [A]`; `tile [tq, tk]` is for its use."""
    if near:
        u, e = _columns(torch.exp(-2 * q)), _rows(torch.exp(2 * k))
        scores.copy_(w.sum())
        for u_d, e_d, c_d in zip(u, e, (-2 * w[:, None, None] * u).unbind(0), strict=True):
            torch.add(u_d, e_d, out=tile)
            scores.addcdiv_(c_d, tile)
        return
    scores.zero_()
    for q_d, k_d, w_d in zip(_columns(q), _rows(k), w, strict=True):
        torch.add(q_d, k_d, out=tile)
        scores.addcmul_(tile.tanh_(), w_d)


def _by_channel_backward(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, near: bool, tile: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`[tq, A]`, `[tk, A]` and `[A]` for `g [tq, tk]`; `tile [tq, tk]` is for its use."""
    width, tq, tk = w.shape[0], q.shape[0], k.shape[0]
    by_row, by_key, of_v = q.new_empty(width, tq), k.new_empty(width, tk), q.new_empty(width, tq, 1, 1)
    # For sums of products by row, as one over all would round more. The strides decide which of torch's loops runs:
    # `tile[..., None]` is the same and takes seven times as long.
    by_row_of_tile = tile[:, None].transpose(1, 2)  # [tq, tk, 1]
    if near:
        u, e = _columns(torch.exp(-2 * q)), _rows(torch.exp(2 * k))
        for d, (u_d, e_d) in enumerate(zip(u, e, strict=True)):
            torch.add(u_d, e_d, out=tile)
            torch.div(u_d, tile, out=tile)
            torch.bmm(g[:, None], by_row_of_tile, out=of_v[d])
            torch.ops.aten.sigmoid_backward(g, tile, grad_input=tile)
            torch.sum(tile, 1, out=by_row[d])
            torch.sum(tile, 0, out=by_key[d])
        lead, summed = 4 * w[:, None], g.sum() - 2 * of_v.sum((1, 2, 3))
    else:
        for d, (q_d, k_d) in enumerate(zip(_columns(q), _rows(k), strict=True)):
            torch.add(q_d, k_d, out=tile)
            tile.tanh_()
            torch.bmm(g[:, None], by_row_of_tile, out=of_v[d])
            torch.ops.aten.tanh_backward(g, tile, grad_input=tile)
            torch.sum(tile, 1, out=by_row[d])
            torch.sum(tile, 0, out=by_key[d])
        lead, summed = w[:, None], of_v.sum((1, 2, 3))
    return (lead * by_row).T, (lead * by_key).T, summed


def _columns(x: Tensor) -> Tensor:
    """`[L, A]` as `[A, L, 1]`, each channel apart."""
    return x.T.contiguous()[:, :, None]


def _rows(x: Tensor) -> Tensor:
    """`[L, A]` as `[A, 1, L]`."""
    return x.T.contiguous()[:, None]
