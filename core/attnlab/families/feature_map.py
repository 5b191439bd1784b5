"""FeatureMapAttention: write `feature_map`, get kernelised attention in every mode. Needs torch; plugins derive from it."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import DTYPES, Capabilities
from attnlab.engines.heads import accumulation_dtype, expand_heads, in_own_precision
from attnlab.engines.linear import align_to_queries, causal_linear, causal_linear_blocks, divided, read_sums
from attnlab.errors import InvalidInput, PluginError
from attnlab.families._relative import relative_offset
from attnlab.interface import Attention
from attnlab.state.states import LinearState, State, check_room
from attnlab.visibility import Visibility

_LARGE = 4.0  # a query's largest feature, at most
_HUGE = 2.0**20  # what no feature of an ordinary token reaches

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
    Features are computed and summed in float32 or better whatever the input's dtype. Where features can all be small at once, an instance
    sets `least_total`, which stands for smaller normalisers and so bounds the derivative. [Katharopoulos et al. 2020, eq. 5-9]
    """

    family: ClassVar[str] = "feature_map"
    to_write: ClassVar[tuple[str, ...]] = ("feature_map", "attend")
    capabilities: Capabilities = FEATURE_MAP_CAPABILITIES
    state_type: ClassVar[type[State]] = LinearState
    conflicts = ((("state", "weights"), "the past keys are summed, so their weights cannot be told apart"),)
    normalise: bool = True
    least_total: float = 0.0

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        """Features `[B, H, L, P]` of `x [B, H, L, D]` (float32 or better), at int64 positions `[L]` or `[B, L]`.

        Positions count from the row's first present key, or, where the map is `shift_invariant`, from any place.
        """
        raise PluginError(f"{type(self).__name__} writes no feature_map(x, *, role, positions)")

    @property
    def _reads_beginnings(self) -> bool:
        """Whether it matters to the map where a sequence begins."""
        return not (self.capabilities.position_free or self.shift_invariant)

    def num_features(self) -> int:
        """P, by asking the map for no tokens; override where that is costly."""
        weight = next(self.parameters(), None)
        nothing = torch.empty(1, self.num_kv_heads, 0, self.key_dim)
        if weight is not None:
            nothing = nothing.to(weight.device, accumulation_dtype(weight.dtype))
        return int(self.feature_map(nothing, role="key", positions=torch.arange(0, device=nothing.device)).shape[-1])

    def sums_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What features of inputs of `dtype` are computed and summed in: float32 or better; override it where a kernel cancels."""
        return accumulation_dtype(dtype)

    def kept_from(self) -> dict[str, Tensor]:
        """All its parameters, which a map of keys may have; override it where it takes fewer, or buffers."""
        return dict(self.named_parameters())

    def default_scale(self) -> float | None:
        return None if self.normalise else super().default_scale()

    def query_factor(self, scale: float) -> float | None:
        """`scale * Dk^0.5`, which folds a host's scale into its query before the map, where the quotient leaves no other place.

        Scores `scale * q k^T` are those of `scale * Dk^0.5 * q` at the usual `Dk^-0.5`, which the features of `q` stand for.
        """
        return scale * math.sqrt(self.key_dim) if self.normalise else None

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = call.visibility
        if visibility is None:
            visibility = Visibility(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
        state, new = call.state, key.shape[2]
        assert state is None or isinstance(state, LinearState)
        if state is not None:
            self._check_features(state, key)
        kv, z = (None, None) if state is None else (state.kv, state.z)
        q = k = None
        offset = 0 if visibility.right is None else relative_offset(self.name, visibility.offset, state)
        if visibility.right is not None and isinstance(offset, int) and offset == 0 and query.shape[2] == new:
            # The common causal call: features are made block by block, while the cache holds them.
            def block(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
                return self._query_features(query, visibility, start, stop), *self._features(
                    key, value, visibility, start, stop
                )

            out, kv, z = causal_linear_blocks(block, new, kv, z, normalise=self.normalise, least=self.least_total)
        else:
            q = self._query_features(query, visibility, 0, query.shape[2])
            k, v = self._features(key, value, visibility, 0, new)
            if visibility.right is None:
                kv, z = _added(kv, z, k, v)
                out = read_sums(q, kv, z, self.normalise, self.least_total)
            else:
                moved_k, moved_v, kv0, z0 = align_to_queries(k, v, offset, query.shape[2], kv, z)
                out = causal_linear(q, moved_k, moved_v, kv0, z0, normalise=self.normalise, least=self.least_total)
                if state is not None:
                    kv, z = _added(kv, z, k, v)
        scale = self.default_scale() if call.scale is None else float(call.scale)
        if scale is not None:
            out = out * scale
        following = None
        if state is not None:
            assert kv is not None
            assert z is not None
            leading = visibility.leading if self._reads_beginnings else None
            following = LinearState(length=state.length + new, leading=leading, kv=kv, z=z)
        weights = None
        if call.need_weights:
            q = self._query_features(query, visibility, 0, query.shape[2]) if q is None else q
            k = self._features(key, value, visibility, 0, new)[0] if k is None else k
            weights = self._weights(q, k, visibility)
            weights = (weights if scale is None else weights * scale).to(query.dtype)
        return AttentionOutput(out.to(query.dtype), weights, None, following)

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearState:
        """Empty sums, in float32 or better; constant in size, so `capacity` asks for nothing."""
        check_room(batch, capacity)
        wide = self.sums_dtype(dtype or torch.get_default_dtype())
        features = self.num_features()
        return LinearState(
            kv=torch.zeros(batch, self.num_kv_heads, features, self.value_dim, device=device, dtype=wide),
            z=torch.zeros(batch, self.num_kv_heads, features, device=device, dtype=wide),
        )

    @in_own_precision
    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert isinstance(call.state, LinearState)
        self._check_features(call.state, key)
        assert call.visibility is not None
        k, v = self._features(key, value, call.visibility, 0, key.shape[2])
        kv, z = _added(call.state.kv, call.state.z, k, v)
        leading = call.visibility.leading if self._reads_beginnings else None
        return LinearState(length=call.state.length + key.shape[2], leading=leading, kv=kv, z=z)

    def _check_features(self, state: LinearState, key: Tensor) -> None:
        if state.kv.dtype != self.sums_dtype(key.dtype):
            raise InvalidInput(
                f"{self.name}: the state holds {state.kv.dtype} and sums of {key.dtype} keys need {self.sums_dtype(key.dtype)}; "
                "use its own init_state(dtype=...)"
            )
        held, made = state.kv.shape[2], self.num_features()
        if held != made:
            raise InvalidInput(
                f"{self.name}: the state sums {held} features and this variant makes {made}; use its own init_state"
            )

    def _query_features(self, query: Tensor, visibility: Visibility, start: int, stop: int) -> Tensor:
        wide = self.sums_dtype(query.dtype)
        positions = visibility.unpadded_query_positions if self._reads_beginnings else visibility.query_positions
        features = self.feature_map(
            query[:, :, start:stop].to(wide), role="query", positions=positions[..., start:stop]
        )
        if not self.normalise:
            return features
        # A factor of a query cancels: products of the features of huge tokens stay in range. It does not cancel beside a least total, so
        # that there only features that no ordinary token has are scaled.
        top = features.detach().abs().amax(-1, keepdim=True)
        factor = (_LARGE / top).clamp(max=1)
        return features * (torch.where(top > _HUGE, factor, 1) if self.least_total else factor)

    def _features(
        self, key: Tensor, value: Tensor, visibility: Visibility, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Features and values of new tokens in the wide dtype; features of padding are zero after the map."""
        wide = self.sums_dtype(key.dtype)
        past = visibility.key_length - key.shape[2]
        at = slice(past + start, past + stop)
        positions = visibility.unpadded_key_positions if self._reads_beginnings else visibility.key_positions
        k = self.feature_map(key[:, :, start:stop].to(wide), role="key", positions=positions[..., at])
        if visibility.key_present is not None:
            k = k.masked_fill(~visibility.key_present[:, None, at, None], 0)
        return k, value[:, :, start:stop].to(wide)

    def _weights(self, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        """Effective weights `[B, Hq, Lq, Lk]`: the linear map from value to out."""
        a = q @ expand_heads(k, q.shape[1]).transpose(-1, -2)
        visible = visibility.tile(0, visibility.query_length, 0, visibility.key_length)
        if visible is not None:
            a = a.masked_fill(~visible, 0)
        return divided(a, a.sum(-1, keepdim=True), self.least_total) if self.normalise else a


def _added(kv: Tensor | None, z: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sums `(kv, z)` with the tokens of features k and values v added."""
    new_kv, new_z = k.transpose(-1, -2) @ v, k.sum(-2)
    return (new_kv if kv is None else kv + new_kv), (new_z if z is None else z + new_z)
