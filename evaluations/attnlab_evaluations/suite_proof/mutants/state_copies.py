"""Mutants that the checks in `checks/state_copies.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab import CacheState, Call, RecurrentState, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta
from attnlab_evaluations.suite_proof.mutants._shared import before_validation
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in


@dataclass(kw_only=True, eq=False)
class _ClonedWhole(CacheState):
    def clone(self) -> _ClonedWhole:
        copied = super().clone()
        copied.length = copied.key.shape[2]
        return copied


class _Concatenated(StoredAttention):
    """The store is as long as its tokens, until it is cropped."""

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        return super().init_state(batch, None, *args, **kwargs)

    def recording(self, call: Call) -> bool:
        return True  # which concatenates


@kept_in(_ClonedWhole)
class ClonesTakeTheWholeStore(_Concatenated):
    """A clone's length is that of the store: cropped tokens come back."""


@dataclass(kw_only=True, eq=False)
class _ReorderedWhole(CacheState):
    def reorder(self, index: Tensor) -> _ReorderedWhole:
        moved = super().reorder(index)
        moved.length = moved.key.shape[2]
        return moved


@kept_in(_ReorderedWhole)
class ReordersTakeTheWholeStore(_Concatenated):
    """Beams that move take the whole store along: cropped tokens come back."""


@dataclass(kw_only=True, eq=False)
class _SharedClone(CacheState):
    def clone(self) -> Any:
        return replace(self)


@kept_in(_SharedClone)
class ClonesShareTheirMemory(StoredAttention):
    """Steps write into a store in place, and clone() hands out the same store."""


@dataclass(kw_only=True, eq=False)
class _SharedDeepcopy(CacheState):
    def __deepcopy__(self, memo: Any) -> _SharedDeepcopy:
        return replace(self)


@kept_in(_SharedDeepcopy)
class DeepcopiesShareTheirMemory(StoredAttention):
    """A __deepcopy__ written for speed copies the fields and not the tensors."""


@dataclass(kw_only=True, eq=False)
class _MaskNotPickled(CacheState):
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "key_present": None}


@kept_in(_MaskNotPickled)
class PicklesWithoutThePadding(StoredAttention):
    """What is saved holds keys and values, and not which of them were present."""


@dataclass(kw_only=True, eq=False)
class _PaddingDoesNotMove(CacheState):
    def to(self, device: torch.device | str) -> Any:
        return replace(super().to(device), key_present=self.key_present)


@kept_in(_PaddingDoesNotMove)
class MovesWithoutThePadding(StoredAttention):
    """Keys and values move to another device, and the mask of what was present does not."""


class UpdatesItsMemoryInPlace(TextbookDelta):
    """The next state is the old one's memory, overwritten: a detached twin of the old one changes with it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if not isinstance(call.state, RecurrentState) or call.recording:
            return answer
        assert isinstance(answer.state, RecurrentState)
        held = call.state.memory.copy_(answer.state.memory)
        return answer._replace(state=replace(answer.state, memory=held))


@dataclass(kw_only=True, eq=False)
class _DetachedClone(CacheState):
    def clone(self) -> Any:
        return self.detach()._map(lambda t: t.clone())


@kept_in(_DetachedClone)
class ClonesLeaveTheGraph(StoredAttention):
    """clone() detaches: training that forks a prompt learns nothing from the prompt."""


@dataclass(kw_only=True, eq=False)
class _StuckRows(CacheState):
    def reorder(self, index: Tensor) -> Any:
        return replace(self, key=self.key[index])


@kept_in(_StuckRows)
class ReordersKeysOnly(StoredAttention):
    """Beams take their keys along and leave their values behind."""


@dataclass(kw_only=True, eq=False)
class _InverseRows(CacheState):
    def reorder(self, index: Tensor) -> Any:
        return super().reorder(torch.argsort(index))


@kept_in(_InverseRows)
class ReordersByTheInverse(StoredAttention):
    """Row index[b] continues from row b: right for two beams that swap, wrong for three that rotate."""


@dataclass(kw_only=True, eq=False)
class _PaddingStays(CacheState):
    def reorder(self, index: Tensor) -> Any:
        return replace(super().reorder(index), key_present=self.key_present)


@kept_in(_PaddingStays)
class ReordersWithoutThePadding(StoredAttention):
    """Beams take keys and values along, and wear the padding of the row that they moved to."""


@dataclass(kw_only=True, eq=False)
class _RowsInPlace(CacheState):
    def reorder(self, index: Tensor) -> Any:
        moved = super().reorder(index)
        if moved.key.shape == self.key.shape and not self.shared:
            self.key.copy_(moved.key)
        return moved


@kept_in(_RowsInPlace)
class ReordersInPlace(StoredAttention):
    """reorder() moves the rows of the state it was called on as well, which stays usable."""


@dataclass(kw_only=True, eq=False)
class _CutAtTheFront(CacheState):
    def crop(self, length: int) -> Any:
        surplus = self.length - length
        cropped = super().crop(length)
        return replace(cropped, key=self.key[:, :, surplus:], value=self.value[:, :, surplus:])


@kept_in(_CutAtTheFront)
class CropsTheOldest(StoredAttention):
    """crop(n) keeps the last n tokens."""


@dataclass(kw_only=True, eq=False)
class _CutLengthOnly(CacheState):
    def crop(self, length: int) -> Any:
        return replace(super().crop(length), key_present=self.key_present)


@kept_in(_CutLengthOnly)
class CropsWithoutThePadding(StoredAttention):
    """crop(n) leaves the mask of the tokens that it forgot."""


@dataclass(kw_only=True, eq=False)
class _CutAndKept(CacheState):
    def crop(self, length: int) -> Any:
        cropped = super().crop(length)
        self.spent = False
        return cropped


@kept_in(_CutAndKept)
class CropsStayUsable(StoredAttention):
    """The state that was cropped stays usable, and the cropped one writes into its store."""


@dataclass(kw_only=True, eq=False)
class _NegativeCuts(CacheState):
    def crop(self, length: int) -> Any:
        return super().crop(length if length >= 0 else self.length + length)


@kept_in(_NegativeCuts)
class CropsFromTheEnd(StoredAttention):
    """crop(-1) forgets the last token, as a slice would."""


class KeepsTheCallersTensors(TextbookAttention):
    """The first step's key and value become the store, without a copy."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert call.state is not None
        assert isinstance(state, CacheState)
        return (keys, values, state) if call.state.length else (key, value, replace(state, key=key, value=value))


class KeepsThePastInTheModule(StoredAttention):
    """States are labels of one store in the module: two sequences write over each other."""

    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        held = getattr(self, "held", None)
        room = max(made.key.shape[2], 64)
        shape = (*made.key.shape[:2], room)
        if held is None or held[0].shape[:3] != shape or held[0].dtype != made.key.dtype:
            key, value = (x.new_zeros(*shape, x.shape[3]) for x in (made.key, made.value))
            self.held = held = key, value
        return replace(made, key=held[0], value=held[1])

    def recording(self, call: Call) -> bool:
        return False


def _keep_mask(named: dict[str, Any]) -> None:
    named["module"].first_input = named.get("key_mask")


@before_validation(_keep_mask)
class KeepsTheCallersMask(TextbookAttention):
    """The first step's key_mask becomes the state's, without a copy."""

    given: Tensor | None

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert call.state is not None
        if call.state.length or self.first_input is None:
            return keys, values, state
        return keys, values, replace(state, key_present=self.first_input)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ClonesTakeTheWholeStore, "cropped_states_may_be_copied", "a clone brings cropped tokens back"),
    Mutant(ReordersTakeTheWholeStore, "cropped_states_may_be_copied", "beams bring cropped tokens back"),
    Mutant(ClonesShareTheirMemory, "copied_states_are_independent", "clone() shares the store"),
    Mutant(DeepcopiesShareTheirMemory, "copied_states_are_independent", "a deepcopy shares the store"),
    Mutant(PicklesWithoutThePadding, "copied_states_are_independent", "a saved state forgets its padding"),
    Mutant(MovesWithoutThePadding, "copied_states_are_independent", "the padding stays on the old device"),
    Mutant(UpdatesItsMemoryInPlace, "copied_states_are_independent", "a recurrence overwrites the state it was given"),
    Mutant(ClonesLeaveTheGraph, "copied_states_carry_gradients", "clone() detaches"),
    Mutant(ReordersKeysOnly, "states_reorder", "beams keep their values"),
    Mutant(ReordersByTheInverse, "states_reorder", "beams move by the inverse permutation"),
    Mutant(ReordersWithoutThePadding, "states_reorder", "beams leave their padding behind"),
    Mutant(ReordersInPlace, "states_reorder", "reorder() changes the state it was called on"),
    Mutant(CropsTheOldest, "cropped_states_equal_shorter_states", "crop() forgets the first tokens"),
    Mutant(CropsWithoutThePadding, "cropped_states_equal_shorter_states", "crop() leaves the mask as long as it was"),
    Mutant(CropsStayUsable, "cropped_states_equal_shorter_states", "a cropped state and its origin share a store"),
    Mutant(CropsFromTheEnd, "cropped_states_equal_shorter_states", "crop(-1) is accepted"),
    Mutant(KeepsTheCallersTensors, "states_own_their_memory", "the first step's tensors become the store"),
    Mutant(KeepsThePastInTheModule, "states_own_their_memory", "two sequences share one store"),
    Mutant(KeepsTheCallersMask, "states_own_their_memory", "the first step's key_mask becomes the state's"),
)
