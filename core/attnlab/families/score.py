"""ScoreAttention: write `scores`, get the rest of softmax attention. Needs torch; plugins derive from it."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import DTYPES, Capabilities
from attnlab.engines.banded import band_of, banded_attention
from attnlab.engines.fused import fused_attention
from attnlab.engines.heads import expand_heads
from attnlab.engines.tiled import Scoring, tiled_attention
from attnlab.errors import InvalidInput, PluginError
from attnlab.interface import Attention
from attnlab.state.origin import Origin, readable
from attnlab.state.states import CacheState, State, check_index
from attnlab.validation.stages import mask_of
from attnlab.visibility import Visibility

SCORE_CAPABILITIES = Capabilities(
    causal=True,
    window=True,
    key_mask=True,
    mask=True,
    segments=True,
    mask_mod=True,
    score_mod=True,
    bias=True,
    softcap=True,
    sinks=True,
    scale=True,
    cross_lengths=True,
    gqa=True,
    value_dim=True,
    dropout=True,
    weights="in_graph",
    lse=True,
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
"""What the family serves for any score; a variant may `dataclasses.replace` parts of it."""


class ScoreAttention(Attention):
    """Softmax attention whose score is a method.

    Write `scores`; optionally `project_query` and `project_key` (run once a call, so that tiles do not repeat them), `reweight`
    (a factor on normalised weights), `visible` (pairs that the formula itself hides) and `default_scale`. An instance whose
    options need them not sets `reweights` or `hides` to False, and faster engines serve it. Set `inner_product` where the score of projected queries and keys is
    their plain product, so that torch's fused kernels serve what they can; `tile_cost` where a score needs a temporary
    of that many elements a pair; and `projected_width`, the width of what `project_key` returns, where states should keep that
    and not the keys.
    """

    family: ClassVar[str] = "score"
    to_write: ClassVar[tuple[str, ...]] = ("scores", "inner_product", "attend", "__init__")
    capabilities: Capabilities = SCORE_CAPABILITIES
    state_type: ClassVar[type[State]] = CacheState
    zeroes_absent_rows = True
    inner_product: bool = False
    tile_cost: int = 1
    projected_width: int | None = None
    reweights: bool = False
    hides: bool = False
    _projects: bool = False

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        kind = type(self)
        self.reweights = kind.reweight is not ScoreAttention.reweight
        self.hides = kind.visible is not ScoreAttention.visible
        self._projects = kind.project_key is not ScoreAttention.project_key

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Scores `[B, Hq, tq, tk]`, before scale, of projected `query [B, Hq, tq, *]` and `key [B, Hq, tk, *]`: a tile.

        Positions are int64, `[tq]` and `[tk]`, or with a leading batch axis where they differ by sequence: they count from the first
        present key of the row or of the segment, so that padding on the left moves none.
        """
        if self.inner_product:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            return query.to(wide) @ key.to(wide).transpose(-1, -2)
        raise PluginError(f"{type(self).__name__} writes no scores(query, key, *, query_positions, key_positions)")

    def project_query(self, query: Tensor) -> Tensor:
        """`[B, Hq, Lq, Dq]` -> `[B, Hq, Lq, *]`, once a call."""
        return query

    def project_key(self, key: Tensor) -> Tensor:
        """`[B, Hq, Lk, Dk]` -> `[B, Hq, Lk, *]`, once a call; heads are expanded already."""
        return key

    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """A factor `[B, Hq, tq, tk]` on the normalised weights of a tile; None where there is none."""
        return None

    def visible(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Which pairs of a tile the formula itself shows, bool `[B, Hq, tq, tk]` or broadcastable, beside what the caller hides."""
        raise PluginError(f"{type(self).__name__} says that it hides pairs but writes no visible(...)")

    def tile_cost_of(self, query: Tensor) -> float:
        """`tile_cost` for projected queries such as these, where it depends on their device or on who traces."""
        return self.tile_cost

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        state: State | None = None
        if call.state is not None:
            key, value, state = self.extended(self._keys_for_cache(key), value, call)
        gone = self._out_of_sight(call)
        if gone:
            key, value, call = key[:, :, gone:], value[:, :, gone:], call.without_keys(0, gone)
        result = self._over(query, key, value, call, projected=state is not None)
        return result._replace(state=state)

    def _out_of_sight(self, call: Call) -> int:
        """How many of the first keys lie before every query's window, from numbers alone: a decoded token reads only the last keys of a cache."""
        visibility = call.visibility
        if visibility is None or visibility.left is None or visibility.sink_tokens or torch.compiler.is_compiling():
            return 0
        if (
            call.forgotten is not None
        ):  # a cache that forgets holds few more, and weights name one range of keys without columns
            return 0
        differences = self.shift_invariant and not (self.hides or self.reweights)  # of positions made by now
        if not (self.capabilities.position_free or differences):
            return 0
        return min(visibility.key_range(0, visibility.query_length)[0], visibility.key_length - 1)

    def _over(self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, projected: bool) -> AttentionOutput:
        """`out`, `weights` and `lse` over these keys, which come out of a state where they are `projected`."""
        query = self.project_query(query)
        if self._projects and not (projected and self.projected_width is not None):
            key = self._projected(key)
        reweight: Any = self.reweight if self.reweights else None
        scale = self.default_scale() if call.scale is None else call.scale
        scale = 1.0 if scale is None else float(scale)
        if self.inner_product and reweight is None and not self.hides:
            shared = value if key.shape[1] == value.shape[1] else expand_heads(value, key.shape[1])
            visibility = call.visibility
            windowed = visibility is not None and visibility.left is not None
            if windowed and visibility is not None and (band := band_of(call, query, key)) is not None:
                inside = banded_attention(query, key, shared, band, scale, visibility.key_present)
                return AttentionOutput(inside.to(value.dtype))
            out = fused_attention(query, key, shared, call, scale)
            if out is not None:
                return AttentionOutput(out)
        scoring = Scoring(
            self.scores,
            scale,
            call.softcap,
            call.score_mod,
            call.bias,
            call.sinks,
            reweight,
            self.visible if self.hides else None,
            call.dropout_p,
            self.tile_cost_of(query),
            self.capabilities.isolates_nonfinite,
        )
        result = tiled_attention(
            query,
            key,
            value,
            scoring,
            call.visibility,
            recording=call.recording or torch.is_grad_enabled(),
            need_weights=call.need_weights,
            need_lse=call.need_lse,
            forgotten=call.forgotten,
        )
        return AttentionOutput(result.out.to(value.dtype), result.weights, result.lse)

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheState:
        """An empty cache of keys and values; with `capacity` allocated at once and never exceeded, else growing."""
        heads, width, value_dim = self.state_sizes
        kind = self.state_type if issubclass(self.state_type, CacheState) else CacheState
        return kind.empty(batch, heads, width, value_dim, capacity, device, dtype, value_heads=self.num_kv_heads)

    def kept_from(self) -> dict[str, Tensor]:
        """All its parameters, where keys are projected; override it where keys take fewer."""
        return dict(self.named_parameters()) if self._projects else {}

    def state_parts(self) -> dict[str, Tensor]:
        return {} if self.projected_width is None else self.kept_from()

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        if self.projected_width is None:
            return (self.num_kv_heads, self.key_dim, self.value_dim)  # not super(): torch.compile cannot trace that
        return self.num_heads, self.projected_width, self.value_dim

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        return self.extended(self._keys_for_cache(key), value, call)[2]

    def precompute(
        self, key: Tensor, *, key_mask: Tensor | None = None, key_lengths: Tensor | None = None
    ) -> PrecomputedKeys:
        """What this variant makes of `key [B, Hkv, Lk, Dk]` before any query is known, for queries that come one by one.

        The answer is called with `(query, value, **arguments)` as the variant is with `(query, key, value, **arguments)`; gradients
        reach key and parameters through it. The precomputed keys have the dtype of the key. Slots that are padding in the calls may hold
        anything where `key_mask` or `key_lengths` names them here as well. `InvalidInput` for a key of another shape.
        """
        fits = (
            isinstance(key, Tensor)
            and key.dim() == 4
            and (key.shape[1], key.shape[3]) == (self.num_kv_heads, self.key_dim)
            and key.is_floating_point()
            and key.layout == torch.strided
            and all(p.device == key.device for p in self.parameters())
        )
        if not fits:
            got = f"{key.dtype} {list(key.shape)} on {key.device}" if isinstance(key, Tensor) else type(key).__name__
            raise InvalidInput(
                f"{self.name}: precompute takes floating-point key [B, {self.num_kv_heads}, Lk, {self.key_dim}] where its "
                f"parameters are, got {got}"
            )
        if key_mask is not None or key_lengths is not None:
            mask = mask_of(self.name, key_lengths=key_lengths, key_mask=key_mask)
            batch, _, length, _ = key.shape
            visibility = Visibility.resolve(
                mask,
                batch=batch,
                num_heads=self.num_heads,
                query_length=0,
                key_length=length,
                device=key.device,
                subject=self.name,
            )
            assert visibility.key_present is not None
            key = key.masked_fill(~visibility.key_present[:, None, :, None], 0)
        return PrecomputedKeys(self, key)

    def _keys_for_cache(self, key: Tensor) -> Tensor:
        """What a state keeps of these keys, in their dtype."""
        return key if self.projected_width is None else self._projected(key).to(key.dtype)

    def _projected(self, key: Tensor) -> Tensor:
        return self.project_key(expand_heads(key, self.num_heads))

    def extended(self, key: Tensor, value: Tensor, call: Call, **further: Any) -> tuple[Tensor, Tensor, CacheState]:
        """Keys and values that the state of `call` holds with these behind them, and the next state; `further` goes to its `append`."""
        assert isinstance(call.state, CacheState)
        visible, held = call.visibility, call.state.value.shape[1]
        if held != value.shape[1]:  # where keys are kept projected, their heads do not tell
            raise InvalidInput(
                f"{self.name}: the state was made for {held} key/value heads and the call has {value.shape[1]}"
            )
        return call.state.append(
            key,
            value,
            # A score_mod may hold trained tensors that nobody can see from here.
            recording=call.recording or (call.score_mod is not None and torch.is_grad_enabled()),
            present=None if visible is None else visible.key_present,
            segments=None if visible is None else visible.key_segments,
            **further,
        )


class PrecomputedKeys:
    """Keys that a variant has worked on once: `keys(query, value, **arguments)`, any number of times. `ScoreAttention.precompute` makes it."""

    def __init__(self, variant: ScoreAttention, key: Tensor) -> None:
        expanded = expand_heads(key, variant.num_heads) if variant._projects else key
        made = variant.project_key(expanded) if variant._projects else key
        self.key = made.to(key.dtype)
        parts = None if made is expanded else readable(variant.kept_from())
        self._origin = None if parts is None else Origin(parts)
        self._source, self._value_heads = variant, variant.num_kv_heads
        # The same parameters behind a gate that expects such keys.
        self._variant = object.__new__(type(variant))  # not copy.copy, which parametrized modules refuse
        self._variant.__dict__.update(variant.__dict__)
        self._variant.num_kv_heads, self._variant.key_dim = self.key.shape[1], self.key.shape[3]
        self._variant._projects = False
        self._variant.projected_width = None
        self._variant.narrow(state="precomputed keys stay as they are; a state is for keys that arrive")

    def __call__(self, query: Tensor, value: Tensor, **arguments: Any) -> AttentionOutput:
        """`Attention.forward` of these keys: `query [B, Hq, Lq, Dq]`, `value [B, Hkv, Lk, Dv]`.

        `InvalidInput` where the parameters that they were computed from have changed.
        """
        if self._origin is not None and (parts := readable(self._source.kept_from())) is not None:
            self._origin.check(parts, self._variant.name, "precomputed keys were")
        if isinstance(value, Tensor) and value.dim() == 4:
            if value.shape[1] != self._value_heads:
                raise InvalidInput(
                    f"{self._variant.name}: value must have {self._value_heads} heads, as the keys had, got {value.shape[1]}"
                )
            value = expand_heads(value, self.key.shape[1])
        answer: AttentionOutput = self._variant(query, self.key, value, **arguments)
        return answer

    def reorder(self, index: Tensor) -> PrecomputedKeys:
        """Those of the sequences `index [B]` (beam search); a copy."""
        check_index(f"{self._variant.name}: precomputed keys' reorder", index)
        chosen = copy(self)
        chosen.key = self.key.index_select(0, index)
        return chosen
