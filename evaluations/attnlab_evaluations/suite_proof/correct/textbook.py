"""Correct dense variants in small steps, of which a mutant overrides one. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnlab import (
    Attention,
    AttentionOutput,
    CacheState,
    Call,
    FeatureMapAttention,
    GateSpec,
    RecurrentAttention,
    ScoreAttention,
    State,
)


class TextbookAttention(Attention):
    """Scaled dot product with every pair in memory: correct, plain, and everything in the order of the contract."""

    family = "score"
    formula = "softmax_dot_product"
    capabilities = replace(ScoreAttention.capabilities, linear_memory=False)
    state_type: ClassVar[type[State]] = CacheState

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        state: State | None = None
        if call.state is not None:
            key, value, state = self.remember(key, value, call)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = query.to(wide), self.grouped(key).to(wide), self.grouped(value).to(wide)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        scale = self.scale(call)
        s = self.adjusted(self.scores(q, k, call) * scale, call, scale)
        visible = self.visible(call, shape, q.device)
        weights, lse = self.normalised(s, visible, None if call.sinks is None else call.sinks.to(wide))
        used = self.dropped(weights, call.dropout_p)
        out = self.mixed(used, v, visible).to(query.dtype)
        shown = self.shown(weights, used).to(query.dtype) if call.need_weights else None
        return AttentionOutput(out, shown, lse if call.need_lse else None, state)

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5 if call.scale is None else call.scale)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q @ k.transpose(-1, -2)

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        s = self.capped(s, call)
        s = self.modified(s, call)
        return s if call.bias is None else s + call.bias.to(s.dtype)

    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s if call.softcap is None else call.softcap * torch.tanh(s / call.softcap)

    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None:
            return s
        from attnlab import Visibility

        visibility = call.visibility or Visibility(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
        return call.score_mod(s, *visibility.indices(0, s.shape[2], 0, s.shape[3])).to(s.dtype)

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        if call.visibility is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return call.visibility.dense().expand(shape)

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        s = s.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
        keys = visible.shape[-1]
        sees = (s[..., :keys] != -torch.inf).any(dim=-1, keepdim=True)
        s = torch.where(sees, s, 0)
        lse = torch.where(sees[..., 0], torch.logsumexp(s, dim=-1), -torch.inf)
        weights = torch.where(sees, torch.softmax(s, dim=-1)[..., :keys], 0)
        return weights, lse

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        return torch.dropout(weights, p, True) if p else weights

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return weights @ v

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        visibility = call.visibility
        assert visibility is not None
        past = call.state.length  # a cropped state holds more
        keys = torch.cat([call.state.key[:, :, :past], key], 2)
        values = torch.cat([call.state.value[:, :, :past], value], 2)
        state = replace(
            call.state,
            key=keys,
            value=values,
            length=keys.shape[2],
            spent=False,
            key_present=visibility.key_present,
            key_segments=visibility.key_segments,
        )
        return keys, values, state

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        return self.remember(key, value, call)[2]

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheState:
        """An empty cache that grows by concatenation; `capacity` asks for nothing here."""
        return CacheState.empty(batch, self.num_kv_heads, self.key_dim, self.value_dim, None, device, dtype)


class TextbookLinear(FeatureMapAttention):
    """Linearised attention with elu + 1, correct."""

    formula = "linearised"
    capabilities = replace(FeatureMapAttention.capabilities)

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.nn.functional.elu(x) + 1


class TextbookDelta(RecurrentAttention):
    """The delta rule, token by token, correct."""

    formula = "delta_rule"
    capabilities = replace(RecurrentAttention.capabilities, gates=True)
    gates: ClassVar[Mapping[str, GateSpec]] = {"beta": GateSpec("[B,Hkv,Lk]", "(0,1)")}

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        step = gates["beta"].unsqueeze(-1) * (value - recalled)
        return memory + key.unsqueeze(-1) * step.unsqueeze(-2)
