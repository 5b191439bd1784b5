"""The additive score of a tile and its gradients in plain torch, in temporaries of a bounded size. Needs torch; see `additive`.

Small tiles are worked on for all channels of some heads at once, large ones channel by channel for as many heads as fit (backward
several channels where heads are few): forward an addition and a fused
multiply-divide over `[tq, tk]`, backward t = g / (u + e)^2 in two passes and three sums over it, which is as few as torch has
functions for: the derivative for q is `4 u (t e)`, that for k `4 e (u t)`, and g's sum of `u / (u + e)` is `u^2 (t 1) + u (t e)`.

Notation: N heads of all items; tq, tk sides of the tile; A channels; g gradient of the scores; u = exp(-2 q), e = exp(2 k).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Elements of the temporaries `[n, tq, A, tk]` and, but for one head that has more, `[h, tq, tk]`: 4 MiB of float32. Less would fit nearer
# caches and cost more in calls.
BLOCK_ELEMENTS = 1 << 20
_PAGE = 4096  # bytes
# Squares of sums of powers up to exp(2 REACH) must be far from the largest float32, and g over them from the smallest.
REACH = 12.0
# (a - b)^2 in one pass over memory; every other way to the square of a sum takes two.
_squared_difference: Any = torch._C._nn.mse_loss


def forward(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    """`[B, H, tq, tk]` of `query [B, H, tq, A]`, `key [B, H, tk, A]` and `v [H, A]`, all of one dtype."""
    q, k, w = _flat(query, key, v)
    # No view: what is made of it in place could not be one.
    made = q.new_empty(*query.shape[:3], key.shape[2])
    scores = made.flatten(0, 1)
    near = _within_reach(q, k)
    if step := _heads_together(q, k):
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            scores[at] = _together(q[at], k[at], w[at], near)
    else:
        by_channel, step = (_by_channel if near else _by_channel_far), _heads_of_tile(scores)
        tile = _beside(scores[:step])
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            by_channel(q[at], k[at], w[at], tile[: len(q[at])], scores[at])
    return made


def backward(
    grad: Tensor, query: Tensor, key: Tensor, v: Tensor, needs_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and v for `grad [B, H, tq, tk]` of the scores; v's, which is a sum of its own, only where it is needed."""
    q, k, w = _flat(query, key, v)
    g = grad.reshape(q.shape[0], q.shape[1], k.shape[1])
    of_query, of_key, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    near = _within_reach(q, k)
    if step := _heads_together(q, k):
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            of_query[at], of_key[at], of_v[at] = _together_backward(g[at], q[at], k[at], w[at], near)
    else:
        by_channel, step = (_by_channel_backward if near else _by_channel_backward_far), _heads_of_tile(g)
        channels = max(BLOCK_ELEMENTS // max(g[:step].numel(), 1), 1)
        tiles = _beside(g[:step], channels)
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            one = (g[at], q[at], k[at], w[at], tiles, needs_v)
            of_query[at], of_key[at], of_v[at] = by_channel(*one)
    return (of_query.view(query.shape), of_key.view(key.shape), of_v.view(-1, *v.shape).sum(0) if needs_v else None)


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


def _together_backward(g: Tensor, q: Tensor, k: Tensor, w: Tensor, near: bool) -> tuple[Tensor, Tensor, Tensor]:
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


def _heads_of_tile(scores: Tensor) -> int:
    """How many heads of `[N, tq, tk]` go together, channel by channel: each thread meets the heads again that it has written."""
    tile = max(scores.shape[1] * scores.shape[2], 1)
    return int(max(min(BLOCK_ELEMENTS // tile, len(scores)), 1))


def _beside(like: Tensor, copies: int = 1) -> Tensor:
    """`[copies * h, tq, tk]` to work in beside `like [h, tq, tk]`; made once, as the system clears what is new page by page.

    It starts half a page off `like`: processors take addresses that agree in their lower 12 bits for one, and a store to one
    would hold up loads from the other. Large tensors begin at the same place of a page, so that they would agree.
    """
    page, size = _PAGE // like.element_size(), copies * like.numel()
    room = like.new_empty(size + page)
    apart = (like.data_ptr() - room.data_ptr()) // like.element_size() + page // 2
    return room[apart % page :][:size].view(-1, *like.shape[1:])


def _by_channel(q: Tensor, k: Tensor, w: Tensor, tile: Tensor, scores: Tensor) -> None:
    """Writes `scores [h, tq, tk]`: `q [h, tq, A]`, `k [h, tk, A]`, `w [h, A]`; `tile [h, tq, tk]` is for its use."""
    u, e, lead = _channels(torch.exp(-2 * q)), _channels(torch.exp(2 * k)), (-2 * w.T)[..., None]
    so_far = w.sum(1)[:, None, None]
    for u_d, e_d, lead_d in zip(u[..., None], e[:, :, None], (lead * u)[..., None], strict=True):
        so_far = torch.addcdiv(so_far, lead_d, torch.add(u_d, e_d, out=tile), out=scores)


def _by_channel_far(q: Tensor, k: Tensor, w: Tensor, tile: Tensor, scores: Tensor) -> None:
    scores.zero_()
    for q_d, k_d, w_d in zip(_channels(q)[..., None], _channels(k)[:, :, None], w.T[:, :, None, None], strict=True):
        scores.addcmul_(torch.add(q_d, k_d, out=tile).tanh_(), w_d)


def _channels(x: Tensor) -> Tensor:
    """`[h, L, A]` -> `[A, h, L]`."""
    return x.permute(2, 0, 1).contiguous()


def _by_channel_backward(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, tiles: Tensor, needs_v: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`[h, tq, A]`, `[h, tk, A]` and `[h, A]`, zeros where it is not needed, for `g [h, tq, tk]`; `tiles` are for its use."""
    heads, tq, tk = g.shape
    u, e = _channels(torch.exp(-2 * q)), _channels(torch.exp(2 * k))  # [A, h, tq] and [A, h, tk]
    t_one, t_e, u_t = torch.empty_like(u), torch.empty_like(u), torch.empty_like(e)
    together = max(len(tiles) // heads, 1)  # channels, whose heads lie beside each other
    groups = (
        torch.split(x.view(-1, *x.shape[2:]), together * heads)
        for x in (u[..., None], -e[:, :, None], u[:, :, None], e[:, :, None], u_t[:, :, None], t_e[:, :, None], t_one)
    )
    turned = tiles.transpose(1, 2)
    for u_d, minus_e_d, row_d, column_d, u_t_d, t_e_d, t_one_d in zip(*groups, strict=True):
        t, t_turned = tiles[: len(u_d)], turned[: len(u_d)]
        _squared_difference(u_d, minus_e_d, reduction=0, out=t)
        by_head = t.view(-1, heads, tq, tk)
        torch.div(g, by_head, out=by_head)
        torch.bmm(row_d, t, out=u_t_d)
        torch.bmm(column_d, t_turned, out=t_e_d)  # t e as a column takes ten times as long
        if needs_v:
            torch.sum(t, 2, out=t_one_d)
    t_e *= u
    of_v = torch.zeros_like(w)
    if needs_v:
        of_v = g.sum((1, 2))[:, None] - 2 * torch.addcmul(t_e, t_one, u.square()).sum(2).T
    lead = 4 * w.T[..., None]
    return (lead * t_e).permute(1, 2, 0), (lead * e * u_t).permute(1, 2, 0), of_v


def _by_channel_backward_far(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, tiles: Tensor, needs_v: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [_of_head_far(*one, tiles[0], needs_v) for one in zip(g, q, k, w, strict=True)]
    of_query, of_key, of_v = (torch.stack(x) for x in zip(*gradients, strict=True))
    return of_query, of_key, of_v


def _of_head_far(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, tile: Tensor, needs_v: bool
) -> tuple[Tensor, Tensor, Tensor]:
    by_row, by_key = q.new_empty(w.shape[0], len(q)), k.new_empty(w.shape[0], len(k))
    of_v = q.new_zeros(w.shape[0], len(q), 1, 1)
    # For sums of products by row, as one over all would round more. The strides decide which of torch's loops runs:
    # `tile[..., None]` is the same and takes seven times as long.
    rows_of_tile = tile[:, None].transpose(1, 2)  # [tq, tk, 1]
    for d, (q_d, k_d) in enumerate(zip(q.T[:, :, None], k.T.contiguous()[:, None], strict=True)):
        torch.add(q_d, k_d, out=tile).tanh_()
        if needs_v:
            torch.bmm(g[:, None], rows_of_tile, out=of_v[d])
        torch.ops.aten.tanh_backward(g, tile, grad_input=tile)
        torch.sum(tile, 1, out=by_row[d])
        torch.sum(tile, 0, out=by_key[d])
    lead = w[:, None]
    return (lead * by_row).T, (lead * by_key).T, of_v.sum((1, 2, 3))
