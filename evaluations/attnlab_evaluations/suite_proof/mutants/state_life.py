"""Mutants that the checks in `checks/state_life.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, CacheState, Call, InvalidInput, RecurrentState, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in


@dataclass(kw_only=True, eq=False)
class _NeverSpent(CacheState):
    def spend(self, subject: str) -> None:
        self.spent = False


@kept_in(_NeverSpent)
class AcceptsASpentState(StoredAttention):
    """Nothing marks a state as used."""


@dataclass(kw_only=True, eq=False)
class _TakenAtTheDoor(CacheState):
    taken: bool = False

    def check(self, subject: str, *rest: Any) -> None:
        super().check(subject, *rest)
        if self.taken:
            raise InvalidInput(f"{subject}: this state was consumed by an earlier call")
        self.taken = True


class SpendsAtTheDoor(TextbookAttention):
    """A state is used up when a call begins, whether or not the call succeeds."""

    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        return _TakenAtTheDoor(key=made.key, value=made.value)

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert isinstance(state, _TakenAtTheDoor)
        return keys, values, replace(state, taken=False)


class CountsBeforeItFails(StoredAttention):
    """The state that came in is told of the new tokens before their scores are known."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        keys, values, state = super().remember(key, value, call)
        assert isinstance(state, CacheState)
        call.state.key, call.state.value, call.state.length = state.key, state.value, state.length
        return keys, values, state


@dataclass(kw_only=True, eq=False)
class _Unjudged(CacheState):
    def check(self, subject: str, *rest: Any) -> None:
        self.check_unspent(subject)


@kept_in(_Unjudged)
class JudgesNoSizes(StoredAttention):
    """A state of other sizes fails somewhere inside, in torch's words."""


@kept_in(_Unjudged)
class SpreadsOneSequence(StoredAttention):
    """A state of one sequence serves a batch: every row gets its past."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        if call.state.key.shape[0] == 1 < key.shape[0]:
            call.state = call.state.reorder(torch.zeros(key.shape[0], dtype=torch.int64, device=key.device))
        return super().remember(key, value, call)


@kept_in(_Unjudged)
class AdoptsTheStatesDtype(StoredAttention):
    """New tokens are cast to whatever the state was made for."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        held = call.state.key.dtype
        return super().remember(key.to(held), value.to(held), call)


@dataclass(kw_only=True, eq=False)
class _Ring(CacheState):
    def check(self, subject: str, *rest: Any) -> None:
        room, self.capacity = self.capacity, None
        try:
            super().check(subject, *rest)
        finally:
            self.capacity = room


@kept_in(_Ring)
class OverwritesTheOldest(StoredAttention):
    """A full store takes new tokens in the place of the oldest ones and says nothing."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        room = call.state.capacity if isinstance(call.state, CacheState) else None
        if room is None:
            return visible
        return visible & (torch.arange(shape[3], device=device) >= shape[3] - room)


@kept_in(_Ring)
class DropsWhatDoesNotFit(StoredAttention):
    """A full store ignores new tokens and says nothing."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        room = call.state.capacity if isinstance(call.state, CacheState) else None
        return visible if room is None else visible & (torch.arange(shape[3], device=device) < room)


@dataclass(kw_only=True, eq=False)
class _AnyBatch(RecurrentState):
    def check(self, subject: str, *rest: Any) -> None:
        self.check_unspent(subject)


class BroadcastsOneSequence(TextbookDelta):
    """The memory of one sequence is broadcast over a batch without a word."""

    def init_state(self, *args: Any, **kwargs: Any) -> RecurrentState:
        made = super().init_state(*args, **kwargs)
        return _AnyBatch(memory=made.memory)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        return answer._replace(state=_AnyBatch(length=answer.state.length, memory=answer.state.memory))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(AcceptsASpentState, "used_states_are_refused", "a state can be used twice"),
    Mutant(SpendsAtTheDoor, "failed_calls_leave_the_state_usable", "a call that fails uses its state up"),
    Mutant(CountsBeforeItFails, "failed_calls_leave_the_state_usable", "a call that fails leaves its tokens"),
    Mutant(JudgesNoSizes, "mismatched_states_are_refused", "sizes of a state are not judged"),
    Mutant(SpreadsOneSequence, "mismatched_states_are_refused", "one sequence's state serves a batch"),
    Mutant(AdoptsTheStatesDtype, "states_of_another_dtype_change_no_result", "keys are cast to the state's dtype"),
    Mutant(OverwritesTheOldest, "full_states_grow_or_raise", "a full store forgets its oldest tokens"),
    Mutant(DropsWhatDoesNotFit, "full_states_grow_or_raise", "a full store drops new tokens"),
    Mutant(BroadcastsOneSequence, "mismatched_states_are_refused", "one sequence's memory serves a batch"),
)
