"""Softmax attention of any score over tiles, in memory that does not grow with `Lq Lk`. Needs torch.

Notation: tq, tk tile sides; s scores; m row maximum; p = exp(s - m); z = sum p; n = sum p v. With autograd off the
softmax is online (Milakov and Gimelshein 2018; Rabe and Staats 2021): one pass. With autograd on, each tile is a checkpoint that
backward recomputes, so that gradients reach whatever the score touches, closures included: whole rows by the plain formula, the
first of them, up to a fixed size, without a checkpoint; of rows that are too long a first pass finds m without a graph (it cancels in n / z, so its derivative is zero), and tiles give
(n, z). One tile covers small inputs: the plain formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnlab.engines.heads import accumulation_dtype, expand_heads, in_own_precision
from attnlab.engines.isolating import all_finite, cleaned, cleaned_rows, nonfinite_sums
from attnlab.engines.recomputing import recomputed
from attnlab.engines.softmax_values import softmax_values
from attnlab.errors import InvalidInput
from attnlab.visibility.resolved import Forgotten, Visibility

if TYPE_CHECKING:
    from attnlab.call import ScoreMod

# Elements of the largest temporary of one tile that costs 1: 2^20 float32 are 4 MiB, near the second-level caches of two cores.
TILE_ELEMENTS = 1 << 20
# Scores up to this many form one tile, the plain formula: cheaper than several while memory is of no concern.
PLAIN_ELEMENTS = 1 << 21
# With autograd, the first whole rows are kept for the backward instead of computed again: up to this many scores, in all 32 MiB
# of float32, and of one head.
KEPT_ELEMENTS = 1 << 23
KEPT_OF_ONE_HEAD = 1 << 20
SMALLEST_SIDE = 64
FEWEST_ROWS = 16  # of whole rows in a tile: with fewer, products of matrices are products of vectors


class Scoring(NamedTuple):
    """How a tile is scored: `scores(query, key, query_positions, key_positions) -> [B, Hq, tq, tk]` and what follows it.

    `reweight(query, query_positions, key_positions)` gives a factor on normalised weights, broadcastable likewise, and `visible`
    of the same which pairs the variant itself shows, bool. `cost` is
    the number of temporaries that the score needs per pair (1 for a product, the hidden size for an additive score as written),
    less than 1 where larger tiles are worth more memory. `isolated`
    keeps NaN and Inf of hidden pairs from everything, at the price of looking whether there are any.
    """

    scores: Callable[..., Tensor]
    scale: float
    softcap: float | None = None
    score_mod: ScoreMod | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    reweight: Callable[..., Tensor | None] | None = None
    visible: Callable[..., Tensor] | None = None
    dropout_p: float = 0.0
    cost: float = 1
    isolated: bool = False


class Returned(NamedTuple):
    """How weights are returned: in which dtype, and with columns of 0 for keys that a state has forgotten."""

    dtype: torch.dtype
    forgotten: Forgotten | None = None


class Result(NamedTuple):
    """`out [B, Hq, Lq, Dv]`, `weights [B, Hq, Lq, Lk]` or None, `lse [B, Hq, Lq]` in float32 or better, or None.

    The output is computed from these very weights, so that its gradient reaches them.
    """

    out: Tensor
    weights: Tensor | None
    lse: Tensor | None


def tile_sides(pairs: int, query_length: int, key_length: int, cost: float, recording: bool = False) -> tuple[int, int]:
    """`(tq, tk)` for `pairs = B Hq` matrices; the whole matrix where it is small, whole rows with autograd where they are short."""
    if pairs * query_length * key_length * max(cost, 1) <= PLAIN_ELEMENTS:
        return query_length, key_length
    budget = max(int(TILE_ELEMENTS / (pairs * cost)), 1)
    if recording and budget >= FEWEST_ROWS * key_length:  # whole rows: their softmax is made with them
        return min(budget // key_length, query_length), key_length
    floor = SMALLEST_SIDE if cost <= 1 else 8
    side = max(floor, 1 << (int(budget**0.5).bit_length() - 1))
    tq = min(side, query_length)
    return tq, min(max(side, budget // tq), key_length)


@in_own_precision
def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    visibility: Visibility | None,
    *,
    recording: bool,
    need_weights: bool = False,
    need_lse: bool = True,
    forgotten: Forgotten | None = None,
) -> Result:
    """Softmax attention of `scoring` over `query [B, Hq, Lq, *]`, `key [B, H, Lk, *]`, `value [B, Hkv, Lk, Dv]`.

    A query that sees nothing gives out 0, weights 0, lse -inf and zero gradient. Weights are before dropout; asking for them
    takes the one-tile path, whose memory is theirs, and gives them in the values' dtype, 0 in the rows of padded queries, with columns of 0
    for the `forgotten` keys that the call was not handed. lse is None without need_lse. The other results are in
    `accumulation_dtype`; the caller casts.
    """
    batch, heads, lq, _ = query.shape
    lk = key.shape[2]
    if visibility is None:
        visibility = Visibility(batch, heads, lq, lk, query.device)
    job = _Job(query, key, value, scoring, visibility, need_lse)
    job.returned = Returned(value.dtype, forgotten) if need_weights else None
    if need_weights or torch.compiler.is_compiling():  # a graph with tiles would serve the lengths of these tiles alone
        return job.plain(need_weights)
    tq, tk = tile_sides(batch * heads, lq, lk, scoring.cost, recording)
    if tq >= lq and tk >= lk:
        return job.plain(need_weights)
    rows = [
        job.row_recorded(q, min(q + tq, lq), tk) if recording else job.row_online(q, min(q + tq, lq), tk)
        for q in range(0, lq, tq)
    ]
    lse = torch.cat([lse for _, lse in rows if lse is not None], 2) if need_lse else None
    return Result(torch.cat([out for out, _ in rows], 2), None, lse)


class _Job:
    """One call's tensors; its methods compute the plain formula, a row block online, or a row block with a graph."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, visibility: Visibility, need_lse: bool
    ) -> None:
        self.need_lse = need_lse
        self.returned: Returned | None = None  # for the weights
        self.query, self.key, self.value, self.how, self.visibility = query, key, value, scoring, visibility
        self.heads = query.shape[1]
        self.dtype = accumulation_dtype(value.dtype)
        self.apart = scoring.isolated and not all_finite(query, key, value)

    def scores(self, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        """Scores of a tile up to and including hiding, `[B, Hq, tq, tk]` in the accumulation dtype."""
        how, visibility = self.how, self.visibility
        query = self.query[:, :, q0:q1]
        key = expand_heads(self.key[:, :, k0:k1], self.heads)
        at = {
            "query_positions": visibility.unpadded_query_positions[..., q0:q1],
            "key_positions": visibility.unpadded_key_positions[..., k0:k1],
        }
        if self.apart:
            with torch.no_grad():
                raw = how.scores(query, key, **at).to(self.dtype)
            (query, bad_query), (key, bad_key) = cleaned_rows(query), cleaned_rows(key)
            s = how.scores(query, key, **at).to(self.dtype)
            s = torch.where(bad_query[..., :, None] | bad_key[..., None, :], raw, s)
        else:
            s = how.scores(query, key, **at).to(self.dtype)
        if how.scale != 1.0:
            s = s * how.scale
        if how.softcap is not None:
            s = how.softcap * torch.tanh(s / how.softcap)
        visible = visibility.tile(q0, q1, k0, k1)
        if how.visible is not None:
            own = how.visible(query, **at)
            visible = own if visible is None else visible & own
        if how.score_mod is not None:
            # What a hidden pair scores must not matter, nor what score_mod's derivative is there.
            s = s if visible is None else s.masked_fill(~visible, 0)
            s = _modified(how.score_mod, s, visibility.indices(q0, q1, k0, k1))
        if how.bias is not None:
            s = s + _part(_part(how.bias, 2, q0, q1), 3, k0, k1).to(self.dtype)
        return s if visible is None else s.masked_fill(~visible, -torch.inf)

    def plain(self, need_weights: bool) -> Result:
        """The formula as written, over the whole matrix at once."""
        out, weights, lse = self._block(0, self.query.shape[2], 0, self.key.shape[2])
        return Result(out, weights if need_weights else None, lse if self.need_lse else None)

    def _block(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(out, weights, lse)` of rows whose visible keys all lie in `[k0, k1)`."""
        s = self.scores(q0, q1, k0, k1)
        how = self.how
        if self._sees_all(q0, q1, k0, k1):  # no row is empty: torch's function makes fewer copies
            if how.reweight is None and not how.dropout_p and not self.need_lse and self.returned is None:
                return *softmax_values(s, self._values(k0, k1)), None
            w = torch.softmax(s, -1)
            weights, used = self._in_graph(self._reweighted(w, q0, q1, k0, k1))
            lse = torch.logsumexp(s, -1) if self.need_lse else None
            return self._mixed(self._dropped(used), s, k0, k1), weights, lse
        peak = s.detach().amax(-1, keepdim=True)  # [B, H, Lq, 1]
        alive = peak != -torch.inf  # a NaN lives on: it was visible
        m = self._with_sinks(peak)
        p = torch.exp(s - m)
        z = self._sum_with_sinks(p.sum(-1, keepdim=True), m)
        w = p / torch.where(alive, z, torch.ones_like(z))
        if how.sinks is not None:
            w = torch.where(alive, w, torch.zeros_like(w))
        lse = torch.where(alive, m + torch.log(torch.where(alive, z, torch.ones_like(z))), -torch.inf)
        weights, used = self._in_graph(self._reweighted(w, q0, q1, k0, k1))
        out = self._mixed(self._dropped(used), s, k0, k1)
        return out, weights, lse[..., 0]

    def _sees_all(self, q0: int, q1: int, k0: int, k1: int) -> bool:
        """Whether every pair is known to be visible without looking."""
        how = self.how
        hides = (how.visible, how.score_mod, how.bias, how.sinks)
        return (
            all(x is None for x in hides)
            and not self.apart
            and not torch.compiler.is_compiling()
            and self.visibility.kind(q0, q1, k0, k1) == "full"
        )

    def row_alone(self, q0: int, q1: int, k0: int, k1: int) -> tuple[Tensor, Tensor | None]:
        out, _, lse = self._block(q0, q1, k0, k1)
        return out, lse

    def row_online(self, q0: int, q1: int, tk: int) -> tuple[Tensor, Tensor]:
        """A row block without a graph, one pass: `(out, lse)`."""
        m = self.query.new_full((*self.query.shape[:2], q1 - q0, 1), -torch.inf, dtype=self.dtype)
        z = torch.zeros_like(m)
        n = m.new_zeros(*m.shape[:3], self.value.shape[3])
        for k0, k1 in self._tiles(q0, q1, tk):
            s = self.scores(q0, q1, k0, k1)
            higher = torch.maximum(m, s.amax(-1, keepdim=True))
            base = torch.where(higher != -torch.inf, higher, torch.zeros_like(higher))
            p = (s - base).exp_()  # not in place of s: a score_mod may have returned its own tensor
            fade = torch.exp(m - base)
            z = z * fade + p.sum(-1, keepdim=True)
            n = n * fade + self._mixed(self._dropped(self._reweighted(p, q0, q1, k0, k1)), s, k0, k1)
            m = higher
        alive = m != -torch.inf
        top = self._with_sinks(m)
        fade = torch.exp(torch.where(alive, m - top, torch.zeros_like(m)))
        z = self._sum_with_sinks(z * fade, top)
        return self._finish(n * fade, z, top, alive)

    def row_recorded(self, q0: int, q1: int, tk: int) -> tuple[Tensor, Tensor | None]:
        """A row block whose tiles are recomputed in backward, but for the first block: `(out, lse)`."""
        tiles = self._tiles(q0, q1, tk)
        again: Any = partial(recomputed, random=self.how.dropout_p > 0)
        if len(tiles) == 1:
            # The first in any case: backward takes as much memory for another.
            kept = q0 == 0 or _kept(q1 * self.key.shape[2], self.query.shape[0] * self.heads)
            if kept:
                return self.row_alone(q0, q1, *tiles[0])
            alone: tuple[Tensor, Tensor | None] = again(self.row_alone, q0, q1, *tiles[0])
            return alone
        with torch.no_grad():
            m = self.query.new_full((*self.query.shape[:2], q1 - q0, 1), -torch.inf, dtype=self.dtype)
            for k0, k1 in tiles:
                m = torch.maximum(m, self.scores(q0, q1, k0, k1).amax(-1, keepdim=True))
            alive = m != -torch.inf
            top = self._with_sinks(m)
        n: Any = self.value.new_zeros(*top.shape[:3], self.value.shape[3], dtype=self.dtype)
        z: Any = torch.zeros_like(top)
        for k0, k1 in tiles:
            tile_n, tile_z = again(self._sums, q0, q1, k0, k1, top)
            n, z = n + tile_n, z + tile_z
        if not tiles:  # nobody sees anything: zeros that stay in the graph
            n = n + (self.query[..., :0].sum() + self.key[..., :0].sum() + self.value[..., :0].sum())
        return self._finish(n, self._sum_with_sinks(z, top), top, alive)

    def _sums(self, q0: int, q1: int, k0: int, k1: int, m: Tensor) -> tuple[Tensor, Tensor]:
        s = self.scores(q0, q1, k0, k1)
        p = torch.exp(s - m)
        used = self._dropped(self._reweighted(p, q0, q1, k0, k1))
        return self._mixed(used, s, k0, k1), p.sum(-1, keepdim=True)

    def _tiles(self, q0: int, q1: int, tk: int) -> list[tuple[int, int]]:
        ranges = self.visibility.key_ranges(q0, q1)
        return [(k, min(k + tk, last)) for first, last in ranges for k in range(first, last, tk)]

    def _mixed(self, weights: Tensor, s: Tensor, k0: int, k1: int) -> Tensor:
        """`weights [B, H, tq, tk]` times the values of those keys; `s` says which pairs are hidden."""
        value = self._values(k0, k1)
        if not self.apart:
            return weights @ value
        return weights @ cleaned(value) + nonfinite_sums(s.detach() != -torch.inf, value)

    def _values(self, k0: int, k1: int) -> Tensor:
        return expand_heads(self.value[:, :, k0:k1], self.heads).to(self.dtype)

    def _with_sinks(self, peak: Tensor) -> Tensor:
        """The reference of the exponentials: finite, and no less than a sink."""
        if self.how.sinks is not None:
            peak = torch.maximum(peak, self.how.sinks.detach().to(peak.dtype)[:, None, None])
        return torch.where(peak != -torch.inf, peak, torch.zeros_like(peak))

    def _sum_with_sinks(self, z: Tensor, m: Tensor) -> Tensor:
        return z if self.how.sinks is None else z + torch.exp(self.how.sinks.to(z.dtype)[:, None, None] - m)

    def _reweighted(self, p: Tensor, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        if self.how.reweight is None:
            return p
        factor = self.how.reweight(
            self.query[:, :, q0:q1],
            query_positions=self.visibility.unpadded_query_positions[..., q0:q1],
            key_positions=self.visibility.unpadded_key_positions[..., k0:k1],
        )
        return p if factor is None else p * factor.to(p.dtype)

    def _in_graph(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Weights as the caller gets them, and the same in the accumulation dtype for the product with values, made from those.

        So a gradient of the output reaches what the caller holds.
        """
        if self.returned is None:
            return w, w
        present = self.visibility.query_present
        weights = w if present is None else w.masked_fill(~present[:, None, :, None], 0)
        precise, forgotten = weights, self.returned.forgotten
        if forgotten is not None:
            weights = forgotten.placed(weights)
        weights = weights.to(self.returned.dtype)
        if not torch.is_grad_enabled():
            return weights, precise
        used = weights.to(w.dtype)
        if forgotten is not None:
            used = forgotten.taken(used)
        if used.dtype != weights.dtype:  # the value that was not rounded, with the gradient of the rounded one
            used = used + (precise - used).detach()
        return weights, used

    def _dropped(self, p: Tensor) -> Tensor:
        return torch.nn.functional.dropout(p, self.how.dropout_p) if self.how.dropout_p else p

    def _finish(self, n: Tensor, z: Tensor, m: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.where(alive, z, torch.ones_like(z))
        out = torch.where(alive, n / z, torch.zeros_like(n))
        return out, torch.where(alive, m + torch.log(z), -torch.inf)[..., 0]


def _kept(scores_of_head: int, heads: int) -> bool:
    """Whether the backward may find that much from the forward."""
    return scores_of_head <= KEPT_OF_ONE_HEAD and heads * scores_of_head <= KEPT_ELEMENTS


def _part(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, start, stop - start)


def _modified(score_mod: ScoreMod, s: Tensor, indices: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    changed: Any = score_mod(s, *indices)
    if not isinstance(changed, Tensor) or not changed.is_floating_point():
        got = str(changed.dtype).removeprefix("torch.") if isinstance(changed, Tensor) else type(changed).__name__
        hint = "; a function that says who may attend goes into mask_mod=" if got == "bool" else ""
        raise InvalidInput(f"score_mod must return scores of the dtype and shape that it got, got {got}{hint}")
    try:
        return changed.to(s.dtype).expand(s.shape)
    except RuntimeError:
        raise InvalidInput(
            f"score_mod must return scores of shape {list(s.shape)} (or broadcastable to it), got {list(changed.shape)}"
        ) from None
