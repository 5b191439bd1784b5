"""Correct feature maps and recurrences as an author writes them. Needs torch.

Where the formula is none of attnlab's own, the definition stands beside the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, FeatureMapAttention, GateSpec, InvalidInput, RecurrentAttention
from attnlab.engines import chunked_recurrence
from attnlab.formulas import linearised, per_query_head, without_absent


class TextbookMaps(FeatureMapAttention):
    """elu + 1, relu or exp features; `options` choose, as in attnlab's own `linearised`."""

    formula = "linearised"
    capabilities = replace(FeatureMapAttention.capabilities)

    def __init__(self, *, feature_map: str = "elu", **sizes: Any) -> None:
        if feature_map not in ("elu", "relu", "exp"):
            raise InvalidInput(f"{type(self).__name__}: feature_map must be elu, relu or exp, got {feature_map!r}")
        super().__init__(**sizes)
        self.options = {"feature_map": feature_map}
        if feature_map == "relu":
            self.least_total = 1e-6
            self.narrow(normalised="all features can be 0")

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        kind = self.options["feature_map"]
        if kind == "elu":
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        if kind == "relu":
            return x.relu()
        return torch.exp(x - x.detach().amax(-1, keepdim=True)) if role == "query" else torch.exp(x.clamp(max=60))


def _cosformer(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> dict[str, Tensor]:
    def mapped(x: Tensor, at: Tensor) -> Tensor:
        angle = (at.to(x.dtype) * torch.pi / 65536)[:, None, :, None]
        return torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], dim=-1)

    query_positions, key_positions = how["positions"]
    how["options"] = {"feature_map": "relu"}  # which leaves what is not negative alone
    return linearised(mapped(query, query_positions), mapped(key, key_positions), value, **how)


class TextbookCosformer(FeatureMapAttention):
    """relu features turned by their position: `cos` of the distance reweights [Qin et al. 2022, eq. 10]; needs positions."""

    formula = "cosformer"
    capabilities = replace(FeatureMapAttention.capabilities, position_free=False, normalised=False)
    definition = staticmethod(_cosformer)
    least_total = 1e-6

    def angle(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.to(x.dtype) * torch.pi / 65536
        return angle[:, None] if angle.dim() == 1 else angle[:, None, :, None]

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        angle = self.angle(x, positions)
        return torch.cat([x.relu() * angle.cos(), x.relu() * angle.sin()], dim=-1)


def _gated_delta(
    query: Tensor, key: Tensor, value: Tensor, *, visible: Tensor, scale: Any, gates: Any, **how: Any
) -> dict[str, Tensor]:
    heads = query.shape[1]
    names = ("beta", "log_decay")
    key, value, beta, decay = (per_query_head(x, heads) for x in (key, value, *(gates[n] for n in names)))
    query, key, value = without_absent(query, key, value, visible)
    state = key.new_zeros(*query.shape[:3], key.shape[-1], value.shape[-1])
    for t in range(key.shape[2]):
        sees = visible[..., t, None, None]
        faded = state * decay[:, :, t].exp()[:, :, None, None, None]
        k, v = key[:, :, None, t, :, None], value[:, :, None, t, None]
        step = k * (v - (k * faded).sum(-2, keepdim=True)) * beta[:, :, t, None, None, None]
        state = torch.where(sees, faded + step, state)
    out = (query.unsqueeze(-1) * state).sum(-2)
    return {"out": out * (key.shape[-1] ** -0.5 if scale is None else scale)}


class TextbookGatedDelta(RecurrentAttention):
    """`S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T` [Yang et al. 2024, eq. 10]."""

    formula = "gated_delta_rule"
    capabilities = replace(RecurrentAttention.capabilities, gates=True)
    gates: ClassVar[Mapping[str, GateSpec]] = {
        "beta": GateSpec("[B,Hkv,Lk]", "(0,1)"),
        "log_decay": GateSpec("[B,Hkv,Lk]", "<=0"),
    }
    definition = staticmethod(_gated_delta)

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        faded = memory * gates["log_decay"].exp()[..., None, None]
        recalled = torch.einsum("bhde,bhd->bhe", faded, key)
        return faded + torch.einsum("bhd,bhe->bhde", key, gates["beta"][..., None] * (value - recalled))


class TextbookChunked(TextbookMaps):
    """The causal form by chunks of 16 tokens, an inner product and a sum that is carried; correct, in small steps."""

    chunk = 16

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        square = query.shape[2] == key.shape[2]
        if visibility is None or visibility.right is None or call.state is not None or call.need_weights or not square:
            return super().attend(query, key, value, call)
        if isinstance(visibility.offset, Tensor) or visibility.offset != 0:
            return super().attend(query, key, value, call)
        group = self.num_heads // self.num_kv_heads
        q = self._query_features(query, visibility, 0, query.shape[2])
        k, v = self._features(key, value, visibility, 0, key.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            out = self.scanned(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        return AttentionOutput(out.to(query.dtype))

    def scanned(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Query i sees keys 0..i; all `[B, H, L, *]`."""
        sums = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
        total = k.new_zeros(*k.shape[:2], k.shape[3], 1)
        rows = []
        for start in self.starts(q.shape[2]):
            part = slice(start, start + self.chunk)
            inner = self.inner(q[:, :, part] @ k[:, :, part].transpose(-1, -2))
            n, z = self.read(q[:, :, part], sums, total)
            rows.append(self.divided(inner @ v[:, :, part] + n, inner.sum(-1, keepdim=True) + z))
            sums, total = self.carried(sums, total, k[:, :, part], v[:, :, part])
        return torch.cat(rows, 2)

    def starts(self, length: int) -> list[int]:
        return list(range(0, length, self.chunk))

    def inner(self, products: Tensor) -> Tensor:
        return products.tril()

    def read(self, q: Tensor, sums: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return q @ sums, q @ total

    def divided(self, n: Tensor, z: Tensor) -> Tensor:
        return n / z.masked_fill(z == 0, 1)

    def carried(self, sums: Tensor, total: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sums + k.transpose(-1, -2) @ v, total + k.sum(-2)[..., None]


class TextbookChunkedDelta(TextbookGatedDelta):
    """Chunks of 16 tokens by the engine, correct; each mutant errs in what one chunk hands to the next, or in what it solves."""

    tokens = 16

    def scan(
        self,
        memory: Tensor,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        gates: Mapping[str, Tensor],
        present: Tensor | None,
        *,
        recording: bool,
    ) -> tuple[Tensor | None, Tensor]:
        beta, decay = gates["beta"], gates["log_decay"]
        if present is not None:
            gone = ~present[:, None, :]
            key, value = (x.masked_fill(gone[..., None], 0) for x in (key, value))
            beta, decay = beta.masked_fill(gone, 0), decay.masked_fill(gone, 0)
        outs = []
        for start in range(0, key.shape[2], self.tokens):
            at = slice(start, start + self.tokens)
            some = None if query is None else query[:, :, :, at]
            out, memory = self.chunk(memory, some, key[:, :, at], value[:, :, at], beta[:, :, at], decay[:, :, at])
            outs.append(out)
        return (torch.cat(outs, 3) if query is not None else None), memory  # type: ignore[arg-type]

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return chunked_recurrence(memory, query, key, value, beta=beta, log_decay=decay, corrects=True)
