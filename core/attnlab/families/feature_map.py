"""FeatureMapAttention: write `feature_map`, get kernelised attention in every mode. Needs torch; plugins derive from it."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import DTYPES, Capabilities
from attnlab.engines.heads import accumulation_dtype, expand_heads
from attnlab.engines.linear import align_to_queries, causal_linear, divided, linear_attention, read
from attnlab.families._relative import relative_offset
from attnlab.interface import Attention
from attnlab.state import LinearState, State
from attnlab.visibility import Visibility

FEATURE_MAP_CAPABILITIES = Capabilities(
    causal=True,
    key_mask=True,
    cross_lengths=True,
    gqa=True,
    value_dim=True,
    weights="effective",
    state=True,
    backward=True,
    dtypes=frozenset(DTYPES),
    devices=frozenset({"cpu", "cuda"}),
    exact=True,
    normalised=True,
    position_free=True,
    deterministic=True,
    linear_in_value=True,
    linear_memory=True,
)
"""What the family serves for any feature map."""


class FeatureMapAttention(Attention):
    """`o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)` over the keys j that query i sees.

    Write `feature_map`. Non-causal in two products, causal in chunks, stepwise with a state of sums; padding on either side.
    Features are computed and summed in float32 or better whatever the input's dtype. [Katharopoulos et al. 2020, eq. 5-9]
    """

    family: ClassVar[str] = "feature_map"
    capabilities: Capabilities = FEATURE_MAP_CAPABILITIES
    conflicts = ((("state", "weights"), "the past keys are summed, so their weights cannot be told apart"),)
    normalise: bool = True

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        """Features `[B, H, L, P]` of `x [B, H, L, D]` (float32 or better), at int64 positions `[L]` or `[B, L]`."""
        raise NotImplementedError(f"{type(self).__name__} writes no feature_map(x, *, role, positions)")

    def num_features(self) -> int:
        """P, by asking the map for no tokens; override where that is costly."""
        weight = next(self.parameters(), None)
        nothing = torch.empty(
            1, self.num_kv_heads, 0, self.key_dim, device=None if weight is None else weight.device
        )
        return int(
            self.feature_map(nothing, role="key", positions=torch.arange(0, device=nothing.device)).shape[-1]
        )

    def default_scale(self) -> float | None:
        return None if self.normalise else super().default_scale()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        wide = accumulation_dtype(query.dtype)
        seen = call.visibility
        if seen is None:
            seen = Visibility(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
        q = self.feature_map(query.to(wide), role="query", positions=seen.query_positions)
        k, v = self._features(key, value, seen)
        state = call.state
        assert state is None or isinstance(state, LinearState)
        kv, z = (None, None) if state is None else (state.kv, state.z)
        if seen.right is None:
            out, new_kv, new_z = linear_attention(q, k, v, self.normalise)
            if kv is not None and z is not None:
                new_kv, new_z = kv + new_kv, z + new_z
                out = read(q, new_kv, new_z, self.normalise)
        else:
            offset = relative_offset(self.name, seen.offset, state)
            moved_k, moved_v, kv0, z0 = align_to_queries(k, v, offset, query.shape[2], kv, z)
            out = causal_linear(q, moved_k, moved_v, kv0, z0, normalise=self.normalise)
            if state is not None and kv is not None and z is not None:
                new_kv, new_z = kv + k.transpose(-1, -2) @ v, z + k.sum(-2)
        if call.scale is not None or not self.normalise:
            scale = self.default_scale() if call.scale is None else float(call.scale)
            out = out if scale is None else out * scale
        following = None if state is None else self._following(state, new_kv, new_z, key.shape[2], seen)
        weights = self._weights(q, k, seen).to(query.dtype) if call.need_weights else None
        return AttentionOutput(out.to(query.dtype), weights, None, following)

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearState:
        """Empty sums, in float32 or better; constant in size, so `capacity` asks for nothing."""
        wide = accumulation_dtype(dtype or torch.get_default_dtype())
        features = self.num_features()
        return LinearState(
            kv=torch.zeros(batch, self.num_kv_heads, features, self.value_dim, device=device, dtype=wide),
            z=torch.zeros(batch, self.num_kv_heads, features, device=device, dtype=wide),
        )

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert isinstance(call.state, LinearState)
        assert call.visibility is not None
        k, v = self._features(key, value, call.visibility)
        kv, z = call.state.kv + k.transpose(-1, -2) @ v, call.state.z + k.sum(-2)
        return self._following(call.state, kv, z, key.shape[2], call.visibility)

    def _features(self, key: Tensor, value: Tensor, seen: Visibility) -> tuple[Tensor, Tensor]:
        """Key features and values in the wide dtype; absent slots' features are zero after the map."""
        wide = accumulation_dtype(key.dtype)
        new = key.shape[2]
        positions = seen.key_positions[..., seen.key_length - new :]
        k = self.feature_map(key.to(wide), role="key", positions=positions)
        if seen.key_present is not None:
            k = k.masked_fill(~seen.key_present[:, None, seen.key_length - new :, None], 0)
        return k, value.to(wide)

    def _following(
        self, state: LinearState, kv: Tensor, z: Tensor, new: int, seen: Visibility
    ) -> LinearState:
        return LinearState(length=state.length + new, kv=kv, z=z, key_present=None)

    def _weights(self, q: Tensor, k: Tensor, seen: Visibility) -> Tensor:
        """Effective weights `[B, Hq, Lq, Lk]`: the linear map from value to out."""
        a = q @ expand_heads(k, q.shape[1]).transpose(-1, -2)
        visible = seen.tile(0, seen.query_length, 0, seen.key_length)
        if visible is not None:
            a = a.masked_fill(~visible, 0)
        return divided(a, a.sum(-1, keepdim=True)) if self.normalise else a
