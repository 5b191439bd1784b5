"""Softmax attention by tiles with a backward of its own, correct, in small steps of which each mutant overrides one.

Notation: T tile side; s scores of a tile; m running maximum; p = exp(s - m); z = sum p; n = sum p v; `seen` who sees
whom. [Dao et al. 2022, algorithms 1 and 4; Dao 2023, section 3.1] Needs torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnlab import Attention, AttentionOutput, Call, ScoreAttention, Visibility


class Tile(NamedTuple):
    """Queries `[q0, q1)` and keys `[k0, k1)`."""

    q0: int
    q1: int
    k0: int
    k1: int


class TextbookTiled(Attention):
    """`softmax(q k^T / sqrt(Dk)) v` by online softmax over tiles; backward recomputes them. No weights, no state."""

    family = "plain"
    formula = "softmax_dot_product"
    side = 32
    capabilities = replace(ScoreAttention.capabilities, score_mod=False, weights=None, state=False, linear_memory=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if visibility is None:
            visibility = Visibility(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = (x.to(wide) for x in (query, key, value))
        bias, sinks = (None if x is None else x.to(wide) for x in (call.bias, call.sinks))
        with torch.autocast(query.device.type, enabled=False):
            out, lse = _Tiles.apply(self, call, visibility, q, k, v, bias, sinks)  # type: ignore[no-untyped-call]
        return AttentionOutput(out.to(query.dtype), None, lse if call.need_lse else None)

    # -- both ways ---------------------------------------------------------------------------------------------

    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5 if call.scale is None else call.scale)

    def expanded(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def tiles(self, visibility: Visibility, q0: int, keys: int) -> list[Tile]:
        q1 = min(q0 + self.side, visibility.query_length)
        first, last = self.reach(visibility, q0, q1)
        return [Tile(q0, q1, k, min(k + self.side, last)) for k in range(first, last, self.side)]

    def reach(self, visibility: Visibility, q0: int, q1: int) -> tuple[int, int]:
        return visibility.key_range(q0, q1)

    def products(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q @ k.transpose(-1, -2) * self.scale(call)

    def adjusted(self, x: Tensor, bias: Tensor | None, call: Call, t: Tile) -> Tensor:
        if call.softcap is not None:
            x = call.softcap * torch.tanh(x / call.softcap)
        return x if bias is None else x + self.bias_part(bias, t)

    def bias_part(self, bias: Tensor, t: Tile) -> Tensor:
        return cut(cut(bias, 2, t.q0, t.q1), 3, t.k0, t.k1)

    def hidden(self, s: Tensor, visibility: Visibility, t: Tile) -> Tensor:
        visible = visibility.tile(*t)
        return s if visible is None else s.masked_fill(~visible, -torch.inf)

    def kept(self, p: Tensor, call: Call, seed: int, t: Tile) -> Tensor:
        """The factor 1 / (1 - p) or 0 of each weight, the same whenever a tile is computed."""
        generator = torch.Generator().manual_seed(seed + t.q0 * 65537 + t.k0)
        drawn = torch.rand(p.shape, generator=generator).to(p.device)
        return (drawn >= call.dropout_p).to(p.dtype) / max(1 - call.dropout_p, 1e-9)

    # -- forward -----------------------------------------------------------------------------------------------

    def forward_row(
        self, call: Call, visibility: Visibility, tiles: list[Tile], q0: int, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        q = saved.query[:, :, q0 : q0 + self.side]
        m = q.new_full((*q.shape[:3], 1), -torch.inf)
        z, n = torch.zeros_like(m), q.new_zeros(*q.shape[:3], saved.value.shape[3])
        for t in tiles:
            x = self.products(q, saved.key[:, :, t.k0 : t.k1], call)
            s = self.hidden(self.adjusted(x, saved.bias, call, t), visibility, t)
            m, z, n = self.joined(m, z, n, s, saved.value[:, :, t.k0 : t.k1], call, saved.seed, t)
        return self.finished(m, z, n, saved.sinks)

    def joined(
        self, m: Tensor, z: Tensor, n: Tensor, s: Tensor, v: Tensor, call: Call, seed: int, t: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Running maximum, normaliser and numerator with one more tile."""
        higher = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(higher > -torch.inf, higher, 0)
        p = torch.exp(s - base)
        fade = torch.exp(m - base)
        used = p * self.kept(p, call, seed, t) if call.dropout_p else p
        return higher, z * fade + p.sum(-1, keepdim=True), n * fade + used @ v

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        alive = m > -torch.inf
        top = torch.where(alive, m, 0)
        if sinks is not None:
            higher = torch.maximum(top, sinks[:, None, None])
            fade = torch.exp(top - higher)
            z, n, top = z * fade + torch.exp(sinks[:, None, None] - higher), n * fade, higher
        z = torch.where(alive, z, 1)
        return torch.where(alive, n / z, 0), torch.where(alive, top + torch.log(z), -torch.inf)

    # -- backward ----------------------------------------------------------------------------------------------

    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return (d_out * out).sum(-1, keepdim=True) - d_lse

    def probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(s - torch.where(lse > -torch.inf, lse, 0))

    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        rows, columns = slice(t.q0, t.q1), slice(t.k0, t.k1)
        q, k, v = saved.query[:, :, rows], saved.key[:, :, columns], saved.value[:, :, columns]
        x = self.products(q, k, call)
        p = self.probabilities(self.hidden(self.adjusted(x, saved.bias, call, t), visibility, t), saved.lse[:, :, rows])
        kept: Any = self.kept(p, call, saved.seed, t) if call.dropout_p else 1.0
        into.value[:, :, columns] += (p * kept).transpose(-1, -2) @ d_out[:, :, rows]
        dp = d_out[:, :, rows] @ v.transpose(-1, -2) * kept
        ds = p * (dp - delta[:, :, rows])
        if into.bias is not None:
            part = self.bias_part(into.bias, t)
            part += ds.sum_to_size(part.shape)
        dx = ds * self.cap_slope(x, call) * self.scale(call)
        into.query[:, :, rows] += dx @ k
        into.key[:, :, columns] += dx.transpose(-1, -2) @ q

    def cap_slope(self, x: Tensor, call: Call) -> Tensor | float:
        return 1.0 if call.softcap is None else 1 - torch.tanh(x / call.softcap) ** 2

    def sinks_gradient(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        share = torch.exp(sinks[:, None, None] - lse).masked_fill(lse == -torch.inf, 0)
        return -(share * delta).sum((0, 2, 3))

    def folded(self, gradient: Tensor) -> Tensor:
        """The gradient of keys or values, summed over the query heads of a group."""
        group = self.num_heads // self.num_kv_heads
        batch, _, *rest = gradient.shape
        return gradient.reshape(batch, self.num_kv_heads, group, *rest).sum(2)


class Saved(NamedTuple):
    """What backward needs; key and value with heads expanded, `lse [B, H, Lq, 1]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    seed: int


class Gradients(NamedTuple):
    """Where backward adds up; key and value with heads expanded."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: TextbookTiled,
        call: Call,
        visibility: Visibility,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        seed = int(torch.randint(1 << 31, ())) if call.dropout_p else 0
        nothing = query.new_empty(0)
        saved = Saved(query, how.expanded(key), how.expanded(value), bias, sinks, nothing, nothing, seed)
        rows = [
            how.forward_row(call, visibility, how.tiles(visibility, q0, key.shape[2]), q0, saved)
            for q0 in range(0, query.shape[2], how.side)
        ]
        out, lse = torch.cat([r[0] for r in rows], 2), torch.cat([r[1] for r in rows], 2)
        ctx.how, ctx.call, ctx.seen, ctx.seed = how, call, visibility, seed
        ctx.save_for_backward(query, key, value, bias, sinks, out, lse)
        return out, lse[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        how, call, visible = ctx.how, ctx.call, ctx.seen
        query, key, value, bias, sinks, out, lse = ctx.saved_tensors
        saved = Saved(query, how.expanded(key), how.expanded(value), bias, sinks, out, lse, ctx.seed)
        into = Gradients(
            torch.zeros_like(saved.query),
            torch.zeros_like(saved.key),
            torch.zeros_like(saved.value),
            None if bias is None else torch.zeros_like(bias),
        )
        delta = how.delta(d_out, d_lse[..., None], out)
        for q0 in range(0, query.shape[2], how.side):
            for t in how.tiles(visible, q0, key.shape[2]):
                how.backward_tile(call, visible, t, saved, d_out, delta, into)
        d_sinks = None if sinks is None else how.sinks_gradient(sinks, lse, delta)
        return None, None, None, into.query, how.folded(into.key), how.folded(into.value), into.bias, d_sinks


def cut(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    """`x[start:stop]` along an axis, all of it where that axis is broadcast; a view."""
    return x if x.shape[axis] == 1 else x.narrow(axis, start, stop - start)
