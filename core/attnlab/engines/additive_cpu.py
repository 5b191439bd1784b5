"""The additive score of a tile and its gradients in plain torch, in temporaries of a bounded size. Needs torch; see `additive`.

Small tiles are worked on for many heads at once, large ones a few channels at a time: forward an addition and a fused
multiply-divide over `[tq, tk]`, backward t = g / (u + e)^2 in two passes and three sums over it, which is as few as torch has
functions for: the derivative for q is `4 u (t e)`, that for k `4 e (u t)`, and g's sum of `u / (u + e)` is `u^2 (t 1) + u (t e)`.

Notation: N heads of all items; tq, tk sides of the tile; A channels; g gradient of the scores; u = exp(-2 q), e = exp(2 k).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Elements of the temporaries `[n, tq, A, tk]`: 4 MiB of float32. Less would fit nearer caches and cost more in calls.
BLOCK_ELEMENTS = 1 << 20
# Squares of sums of powers up to exp(2 REACH) must be far from the largest float32, and g over them from the smallest.
REACH = 12.0
# (a - b)^2 in one pass over memory; every other way to the square of a sum takes two.
_squared_difference: Any = torch._C._nn.mse_loss


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
        by_channel = _by_channel if near else _by_channel_far
        tiles = _tiles(scores[0])
        for n in range(q.shape[0]):
            by_channel(q[n], k[n], w[n], tiles, scores[n])
    return scores.view(*query.shape[:3], key.shape[2])


def backward(
    grad: Tensor, query: Tensor, key: Tensor, v: Tensor, v_asked: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of query, key and v for `grad [B, H, tq, tk]` of the scores; v's, which is a sum of its own, where it is asked."""
    q, k, w = _flat(query, key, v)
    g = grad.reshape(q.shape[0], q.shape[1], k.shape[1])
    of_query, of_key, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)
    near = _within_reach(q, k)
    if step := _heads_together(q, k):
        for n in range(0, q.shape[0], step):
            at = slice(n, n + step)
            of_query[at], of_key[at], of_v[at] = _together_backward(g[at], q[at], k[at], w[at], near)
    else:
        tiles = _tiles(g[0])
        for n in range(q.shape[0]):
            one = (g[n], q[n], k[n], w[n], tiles)
            of_query[n], of_key[n], of_v[n] = (
                _by_channel_backward(*one, v_asked) if near else _by_channel_backward_far(*one)
            )
    return (
        of_query.view(query.shape),
        of_key.view(key.shape),
        of_v.view(-1, *v.shape).sum(0) if v_asked else None,
    )


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


def _tiles(like: Tensor) -> Tensor:
    """`[channels, tq, tk]` to work in, for a `[tq, tk]`; made once, as the system clears what is new page by page."""
    return like.new_empty(max(BLOCK_ELEMENTS // like.numel(), 1), *like.shape)


def _by_channel(q: Tensor, k: Tensor, w: Tensor, tiles: Tensor, scores: Tensor) -> None:
    """Writes `scores [tq, tk]` of one head: `q [tq, A]`, `k [tk, A]`, `w [A]`; `tiles` are for its use."""
    u, e = torch.exp(-2 * q).T.contiguous()[:, :, None], torch.exp(2 * k).T.contiguous()[:, None]
    lead = iter((-2 * w[:, None, None] * u).unbind(0))
    scores.copy_(w.sum())
    for some_u, some_e in zip(torch.split(u, len(tiles)), torch.split(e, len(tiles)), strict=True):
        sums = torch.add(some_u, some_e, out=tiles[: len(some_u)])
        for sum_d in sums.unbind(0):
            scores.addcdiv_(next(lead), sum_d)


def _by_channel_far(q: Tensor, k: Tensor, w: Tensor, tiles: Tensor, scores: Tensor) -> None:
    scores.zero_()
    for q_d, k_d, w_d in zip(q.T[:, :, None], k.T.contiguous()[:, None], w, strict=True):
        scores.addcmul_(torch.add(q_d, k_d, out=tiles[0]).tanh_(), w_d)


def _by_channel_backward(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, tiles: Tensor, v_asked: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`[tq, A]`, `[tk, A]` and `[A]`, zeros where it is not asked, for `g [tq, tk]`; `tiles` are for its use."""
    u, e = torch.exp(-2 * q).T.contiguous(), torch.exp(2 * k).T.contiguous()  # [A, tq] and [A, tk]
    t_one, t_e, u_t = torch.empty_like(u), torch.empty_like(u), torch.empty_like(e)
    groups = (torch.split(x, len(tiles)) for x in (u[:, None], e[:, None], u_t[:, None], t_e[:, None], t_one))
    for some_u, some_e, some_u_t, some_t_e, some_t_one in zip(*groups, strict=True):
        t = tiles[: len(some_u)]
        _squared_difference(some_u.transpose(1, 2), -some_e, reduction=0, out=t)
        torch.div(g, t, out=t)
        torch.bmm(some_u, t, out=some_u_t)
        torch.bmm(some_e, t.transpose(1, 2), out=some_t_e)  # t e as a column takes ten times as long
        if v_asked:
            torch.sum(t, 2, out=some_t_one)
    t_e *= u
    of_v = g.sum() - 2 * torch.addcmul(t_e, t_one, u.square()).sum(1) if v_asked else torch.zeros_like(w)
    lead = 4 * w[:, None]
    return (lead * t_e).T, (lead * e * u_t).T, of_v


def _by_channel_backward_far(
    g: Tensor, q: Tensor, k: Tensor, w: Tensor, tiles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    by_row, by_key = q.new_empty(w.shape[0], len(q)), k.new_empty(w.shape[0], len(k))
    of_v, tile = q.new_empty(w.shape[0], len(q), 1, 1), tiles[0]
    # For sums of products by row, as one over all would round more. The strides decide which of torch's loops runs:
    # `tile[..., None]` is the same and takes seven times as long.
    rows_of_tile = tile[:, None].transpose(1, 2)  # [tq, tk, 1]
    for d, (q_d, k_d) in enumerate(zip(q.T[:, :, None], k.T.contiguous()[:, None], strict=True)):
        torch.add(q_d, k_d, out=tile).tanh_()
        torch.bmm(g[:, None], rows_of_tile, out=of_v[d])
        torch.ops.aten.tanh_backward(g, tile, grad_input=tile)
        torch.sum(tile, 1, out=by_row[d])
        torch.sum(tile, 0, out=by_key[d])
    lead = w[:, None]
    return (lead * by_row).T, (lead * by_key).T, of_v.sum((1, 2, 3))
