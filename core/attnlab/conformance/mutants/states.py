"""Mutants of the state: what was seen before, how often, and whose memory it is. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab.conformance.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, before_the_gate
from attnlab.state import CacheState, RecurrentState, State


class ForgetsThePadding(TextbookAttention):
    """Keys that were absent in an earlier step come back."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        return keys, values, replace(state, key_present=None)


class CausalWithinTheChunk(TextbookAttention):
    """A step of several tokens is aligned top-left: it sees the oldest keys instead of its own past."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.state is None or not call.state.length:
            return visible
        return visible & torch.ones(shape, dtype=torch.bool, device=device).tril(
            0 if shape[2] > 1 else shape[3]
        )


class DetachesThePast(TextbookAttention):
    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        past = replace(call.state, key=call.state.key.detach(), value=call.state.value.detach())
        stepped = Call(visibility=call.visibility, state=past)
        return super().remember(key, value, stepped)


class HalfPrecisionPast(TextbookDelta):
    """The memory is kept in bfloat16 between calls."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        memory = answer.state.memory
        return answer._replace(state=replace(answer.state, memory=memory.to(torch.bfloat16).to(memory.dtype)))


@dataclass(kw_only=True, eq=False)
class _NeverSpent(CacheState):
    def spend(self, subject: str) -> None:
        self.spent = False


class AcceptsASpentState(TextbookAttention):
    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        return _NeverSpent(key=made.key, value=made.value)


@dataclass(kw_only=True, eq=False)
class _SharedClone(CacheState):
    def clone(self) -> _SharedClone:
        return replace(self)


class ClonesShareTheirMemory(TextbookAttention):
    """Steps write into a store in place, and clone() hands out the same store."""

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        made = CacheState.empty(batch, self.num_kv_heads, self.key_dim, self.value_dim, 64, *args, **kwargs)
        return _SharedClone(key=made.key, value=made.value)

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        state, seen = call.state, call.visibility
        assert isinstance(state, CacheState)
        assert seen is not None
        stop = state.length + key.shape[2]
        with torch.no_grad():
            state.key[:, :, state.length : stop] = key
            state.value[:, :, state.length : stop] = value
        following = replace(state, length=stop, spent=False, key_present=seen.key_present)
        return state.key[:, :, :stop], state.value[:, :, :stop], following


@dataclass(kw_only=True, eq=False)
class _StuckRows(CacheState):
    def reorder(self, index: Tensor) -> _StuckRows:
        return replace(self, key=self.key[index])


class ReordersKeysOnly(TextbookAttention):
    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        return _StuckRows(key=made.key, value=made.value)


class KeepsTheCallersTensors(TextbookAttention):
    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert call.state is not None
        assert isinstance(state, CacheState)
        return (
            (keys, values, state) if call.state.length else (key, value, replace(state, key=key, value=value))
        )


def _keep_raw(named: dict[str, Any]) -> None:
    named["module"].raw = (named["key"], named["value"])


@before_the_gate(_keep_raw)
class RemembersWhatTheGateCleaned(TextbookAttention):
    raw: tuple[Tensor, Tensor]

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        return super().remember(*self.raw, call)


class CapacityIsAttended(TextbookAttention):
    """Unused slots of a preallocated store take part as zeros."""

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(batch, None, *args, **kwargs)
        self.room = capacity or 0
        return made

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        unused = getattr(self, "room", 0) - s.shape[-1]
        if unused <= 0 or sinks is not None:
            return super().normalised(s, visible, sinks)
        zeros = torch.full((s.shape[1],), float(torch.tensor(unused).log()), dtype=s.dtype, device=s.device)
        return super().normalised(s, visible, zeros)


MUTANTS = (
    Mutant(ForgetsThePadding, "chunks_equal_the_whole", "padding of earlier steps is lost"),
    Mutant(CausalWithinTheChunk, "chunks_equal_the_whole", "a step is aligned top-left"),
    Mutant(CapacityIsAttended, "chunks_equal_the_whole", "zeros of a static store take weight"),
    Mutant(HalfPrecisionPast, "chunks_equal_the_whole", "a recurrence's memory in half precision"),
    Mutant(DetachesThePast, "state_gradients_match_definition", "no gradient reaches earlier steps"),
    Mutant(AcceptsASpentState, "a_consumed_state_raises", "a state can be used twice"),
    Mutant(ClonesShareTheirMemory, "clones_fork", "clone() shares the store"),
    Mutant(ReordersKeysOnly, "states_reorder", "beams keep their values"),
    Mutant(KeepsTheCallersTensors, "states_own_their_memory", "the first step's tensors become the store"),
    Mutant(RemembersWhatTheGateCleaned, "absent_slots_reach_no_state", "uncleaned tensors enter the store"),
)
