"""Mutants of the cache: what was seen before, from where, and how often. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab.state import CacheState, RecurrentState, State
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, before_the_gate


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
        return visible & torch.ones(shape, dtype=torch.bool, device=device).tril(0 if shape[2] > 1 else shape[3])


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


class CountsFromTheChunk(TextbookAttention):
    """What a score_mod sees as query and key positions starts again with every step."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None or call.state is None or call.visibility is None:
            return super().modified(s, call)
        b, h, q, k = call.visibility.indices(0, s.shape[2], 0, s.shape[3])
        past = call.state.length
        return call.score_mod(s, b, h, q - past, k - past).to(s.dtype)


class CountsThePastTwice(TextbookAttention):
    """Positions of new queries advance by the prompt again: 6, 12, ... for a prompt of 6."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is None or seen is None or seen.left is None:
            return super().visible(call, shape, device)
        q = torch.arange(shape[2], device=device)[:, None] + 2 * call.state.length
        k = torch.arange(shape[3], device=device)
        present = True if seen.key_present is None else seen.key_present[:, None, None, :]
        return ((k <= q) & (k >= q - seen.left) & present).expand(shape)


class EvictsOneTooMany(TextbookAttention):
    """A rolling store for windows drops the last key that the window still shows."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible, seen = super().visible(call, shape, device), call.visibility
        if call.state is None or seen is None or seen.left is None:
            return visible
        oldest = shape[3] - shape[2] - seen.left
        return visible & (torch.arange(shape[3], device=device) > oldest)


class MasksOnlyTheNewKeys(TextbookAttention):
    """A bias over past and new is added to the last keys only, as if the past had none."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.state is None or call.bias is None:
            return super().adjusted(s, call, scale)
        new = torch.arange(s.shape[3], device=s.device) >= call.state.length
        return self.modified(self.capped(s, call), call) + torch.where(new, call.bias.to(s.dtype), 0)


@dataclass(kw_only=True, eq=False)
class _ForgetsWhenIdle(CacheState):
    def renewed(self) -> _ForgetsWhenIdle:
        return replace(self, spent=False, key_present=None)


class AnEmptyStepLosesThePadding(TextbookAttention):
    """A step without tokens hands on a state that knows of no absent keys."""

    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        return _ForgetsWhenIdle(key=made.key, value=made.value)


class GrowsOneShort(TextbookAttention):
    """A store that doubles when it is full leaves the last token behind."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        past = state.length - key.shape[2]
        if past and past & (past - 1) == 0 and past >= 16:
            keys, values = keys.clone(), values.clone()
            keys[:, :, past - 1], values[:, :, past - 1] = 0, 0
        return keys, values, state


class GradientsStopAtTheStore(TextbookAttention):
    """New tokens are written into a store under no_grad, also while autograd records."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        with torch.no_grad():
            return super().remember(key, value, call)


MUTANTS = (
    Mutant(ForgetsThePadding, "chunks_equal_the_whole", "padding of earlier steps is lost"),
    Mutant(CausalWithinTheChunk, "chunks_equal_the_whole", "a step is aligned top-left"),
    Mutant(CapacityIsAttended, "chunks_equal_the_whole", "zeros of a static store take weight"),
    Mutant(CountsFromTheChunk, "chunks_equal_the_whole", "score_mod positions restart with each step"),
    Mutant(CountsThePastTwice, "chunks_equal_the_whole", "positions advance by the past twice"),
    Mutant(EvictsOneTooMany, "chunks_equal_the_whole", "a rolling store is one key too short"),
    Mutant(MasksOnlyTheNewKeys, "chunks_equal_the_whole", "a bias reaches only the new keys"),
    Mutant(AnEmptyStepLosesThePadding, "chunks_equal_the_whole", "a step without tokens forgets the padding"),
    Mutant(GrowsOneShort, "long_runs_split_anywhere", "a store that grows loses a token"),
    Mutant(HalfPrecisionPast, "chunks_equal_the_whole", "a recurrence's memory in half precision"),
    Mutant(DetachesThePast, "state_gradients_match_definition", "no gradient reaches earlier steps"),
    Mutant(GradientsStopAtTheStore, "state_gradients_match_definition", "keys are stored without a graph"),
    Mutant(RemembersWhatTheGateCleaned, "absent_slots_reach_no_state", "uncleaned tensors enter the store"),
)
