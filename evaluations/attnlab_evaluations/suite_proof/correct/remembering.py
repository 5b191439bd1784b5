"""States of another make: a memory that stays where it is, a running mean, a ring of the last keys. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab import (
    Attention,
    AttentionOutput,
    Call,
    Capabilities,
    InvalidInput,
    RecurrentAttention,
    RecurrentState,
    State,
    UnsupportedRequest,
)
from attnlab.engines import accumulation_dtype, expand_heads, in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import each_head, products, scale_of, softmax_rows, widened
from attnlab_evaluations.suite_proof.correct.sums import linear_sum


@dataclass(kw_only=True, eq=False)
class PinnedState(RecurrentState):
    """A memory whose rows stay where they are: a kernel holds addresses into it."""

    def reorder(self, index: Tensor) -> PinnedState:
        raise UnsupportedRequest("state.reorder: rows of this memory stay in their place; run each beam as its own row")


class PinnedMemoryAttention(RecurrentAttention):
    """`S_t = S_{t-1} + k_t (x) v_t`, `o_i = scale q_i^T S`, whose state can be neither cropped nor reordered."""

    name = "pinned_memory"
    formula = "linear_sum"
    definition = staticmethod(linear_sum)
    capabilities = replace(RecurrentAttention.capabilities, linear_in_value=True)
    state_type = PinnedState

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
        return memory + key[..., :, None] * value[..., None, :]

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        initial: Tensor | None = None,
    ) -> PinnedState:
        return _pinned(super().init_state(batch, capacity, device, dtype, initial=initial))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        result = super().attend(query, key, value, call)
        return result if result.state is None else result._replace(state=_pinned(result.state))


def _pinned(state: State) -> PinnedState:
    assert isinstance(state, RecurrentState)
    return PinnedState(length=state.length, memory=state.memory)


def running_mean(query: Tensor, key: Tensor, value: Tensor, *, visible: Tensor, **rest: Any) -> dict[str, Tensor]:
    """The mean of the visible values, whatever query and key hold."""
    value = each_head(value, query.shape[1])
    weights = visible.to(value.dtype) / visible.sum(-1, keepdim=True).clamp_min(1)
    return {"out": weights @ value, "weights": weights}


@dataclass(kw_only=True, eq=False)
class MeanState(State):
    """Sum `[B, Hkv, Dv]` and number `[B]` of the values so far, float32 or better."""

    total: Tensor
    count: Tensor

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        super().check(subject, batch, kv_heads, key_dim, value_dim, new, key)
        expected = (batch, kv_heads, value_dim), accumulation_dtype(key.dtype)
        if (tuple(self.total.shape), self.total.dtype) != expected:
            raise InvalidInput(
                f"{subject}: the state sums {list(self.total.shape)} in {self.total.dtype} and the call needs {expected}"
            )


class RunningMeanAttention(Attention):
    """Each query gets the mean of the values up to it. Zhang et al. 2018, "Average Attention Network", eq. 2.

    Queries and keys are never read. The state is a sum and a count. With `causal`, queries stand at the keys that come with them.
    """

    name = "running_mean"
    formula = "running_mean"
    definition = staticmethod(running_mean)
    state_type = MeanState
    capabilities = Capabilities(
        causal=True,
        key_mask=True,
        gqa=True,
        value_dim=True,
        query_dim=True,
        state=True,
        backward=True,
        dtypes=frozenset({"float64", "float32", "bfloat16"}),
        devices=frozenset({"cpu", "cuda"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
        linear_memory=True,
    )

    def default_scale(self) -> None:
        return None

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visible, new, queries = call.visibility, value.shape[2], query.shape[2]
        v = value.to(accumulation_dtype(value.dtype))
        here = v.new_ones(v.shape[0], new)
        if visible is not None and visible.key_present is not None:
            here = visible.key_present[:, -new:].to(v.dtype)
        total, count = v.cumsum(2), here.cumsum(1)
        if isinstance(call.state, MeanState):
            total = total + call.state.total[:, :, None]
            count = count + call.state.count[:, None]
        last = total[:, :, -1], count[:, -1]
        if visible is None or visible.right is None:  # all of them, for every query
            total, count = (x[..., None].expand(*x.shape, queries) for x in last)
            total = total.transpose(-1, -2)
        else:
            total, count = self._at_queries(total, count, call)
        out = total / count.clamp_min(1)[:, None, :, None]
        following = None
        if call.state is not None:
            following = MeanState(length=call.state.length + new, total=last[0], count=last[1])
        return AttentionOutput(expand_heads(out, self.num_heads).to(value.dtype).contiguous(), None, None, following)

    def _at_queries(self, total: Tensor, count: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Sums and counts at each query's position among the new keys; nothing before the first."""
        visible, past = call.visibility, 0 if call.state is None else call.state.length
        assert visible is not None
        offset = visible.offset
        if past and (isinstance(offset, Tensor) or offset < past - 1):
            raise InvalidInput(
                f"{self.name}: offset must be {past - 1} or more, as the past is summed up, got {offset}"
            )
        at = visible.query_positions.expand(total.shape[0], -1) - past  # [B, Lq]
        first_total = torch.zeros_like(total[:, :, :1]), torch.zeros_like(count[:, :1])
        if isinstance(call.state, MeanState):
            first_total = call.state.total[:, :, None], call.state.count[:, None]
        total, count = torch.cat([first_total[0], total], 2), torch.cat([first_total[1], count], 1)
        index = (at + 1).clamp(0, total.shape[2] - 1)
        wide = index[:, None, :, None].expand(-1, total.shape[1], -1, total.shape[3])
        return total.gather(2, wide), count.gather(1, index)

    def init_state(self, batch: int, capacity: int | None = None, device: Any = None, dtype: Any = None) -> MeanState:
        wide = accumulation_dtype(dtype or torch.get_default_dtype())
        total = torch.zeros(batch, self.num_kv_heads, self.value_dim, device=device, dtype=wide)
        return MeanState(total=total, count=torch.zeros(batch, device=device, dtype=wide))

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        nobody = key.new_zeros(key.shape[0], self.num_heads, 0, self.head_dim)
        state = self.attend(nobody, key, value, call).state
        assert state is not None
        return state


REACH = 4


def last_few(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """Softmax over the visible keys that stand less than 4 before the query, or after it."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    near = positions[1][:, None, :] > positions[0][:, :, None] - REACH
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query, key, visible=visible & near[:, None], bias=None, scale=scale)
    weights, lse = softmax_rows(s, visible)
    return {"out": weights @ value, "weights": weights, "lse": lse}


@dataclass(kw_only=True, eq=False)
class RingState(State):
    """The last keys and values `[B, Hkv, 3 or fewer, D]`; older ones are forgotten, so nothing can be cropped."""

    key: Tensor
    value: Tensor

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        super().check(subject, batch, kv_heads, key_dim, value_dim, new, key)
        held = self.key.shape[1], self.key.shape[3], self.value.shape[3], self.key.dtype
        if held != (kv_heads, key_dim, value_dim, key.dtype):
            raise InvalidInput(
                f"{subject}: the state was made for heads, key width, value width and dtype {held} and the call has "
                f"{(kv_heads, key_dim, value_dim, key.dtype)}"
            )


class RingAttention(Attention):
    """Softmax over a band of the last 4 positions, decoding with a store of 3 keys. Mistral 7B (Jiang et al. 2023), section 2.

    The band is part of the formula, whatever else the call hides.
    """

    name = "ring"
    formula = "last_few"
    definition = staticmethod(last_few)
    state_type = RingState
    capabilities = Capabilities(
        causal=True,
        key_mask=True,
        scale=True,
        gqa=True,
        value_dim=True,
        lse=True,
        state=True,
        backward=True,
        dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
        exact=True,
        normalised=True,
        deterministic=True,
        linear_in_value=True,
    )

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        past = 0 if call.state is None else call.state.length
        total = past + key.shape[2]
        if isinstance(call.state, RingState):
            key, value = torch.cat([call.state.key, key], 2), torch.cat([call.state.value, value], 2)
        held = key.shape[2]
        places = torch.arange(total - held, total, device=key.device)
        q, k, v = widened(query, key, value)
        where = (
            torch.arange(q.shape[2], device=q.device) if call.visibility is None else call.visibility.query_positions
        )
        visible = (places > where[..., :, None] - REACH).expand(q.shape[0], -1, -1)[:, None]  # [B, 1, Lq, held]
        if call.visibility is not None:
            if past and (isinstance(call.visibility.offset, Tensor) or call.visibility.offset < past):
                raise InvalidInput(f"{self.name}: keys that a query before the state's end would see are forgotten")
            visible = visible & call.visibility.dense()[..., total - held :]
        scale = scale_of(self, call)
        s = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
        sees = visible.any(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(~sees, 0), -1).masked_fill(~sees, 0)
        lse = None
        if call.need_lse:
            lse = torch.logsumexp(s.masked_fill(~sees, 0), -1).masked_fill(~sees[..., 0], -torch.inf)
        following = None if call.state is None else self._kept(key, value, total, call)
        return AttentionOutput((p @ v).to(query.dtype), None, lse, following)

    def _kept(self, key: Tensor, value: Tensor, total: int, call: Call) -> RingState:
        keep = min(REACH - 1, key.shape[2])
        last = slice(key.shape[2] - keep, key.shape[2])
        return RingState(
            length=total,
            key=key[:, :, last].clone(),
            value=value[:, :, last].clone(),
            key_present=None if call.visibility is None else call.visibility.key_present,
        )

    def init_state(self, batch: int, capacity: int | None = None, device: Any = None, dtype: Any = None) -> RingState:
        key = torch.zeros(batch, self.num_kv_heads, 0, self.key_dim, device=device, dtype=dtype)
        return RingState(key=key, value=key.new_zeros(batch, self.num_kv_heads, 0, self.value_dim))

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert isinstance(call.state, RingState)
        total = call.state.length + key.shape[2]
        key, value = torch.cat([call.state.key, key], 2), torch.cat([call.state.value, value], 2)
        return self._kept(key, value, total, call)
