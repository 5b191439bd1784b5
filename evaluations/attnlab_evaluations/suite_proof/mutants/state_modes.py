"""Mutants that the checks in `checks/state_modes.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, CacheState, Call, LinearState, RecurrentState, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in


@dataclass(kw_only=True, eq=False)
class _Unborrowed(CacheState):
    def _borrowed(self) -> bool:
        return False


@kept_in(_Unborrowed)
class WritesIntoAnInferenceStore(StoredAttention):
    """A store made in inference mode is written to outside of it."""


class AttendsTheWholeStore(StoredAttention):
    """Unused slots get weight 0 and are multiplied all the same: 0 * NaN."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        unused = getattr(self, "unused", None)
        out = weights @ v
        return out if unused is None else out + 0 * unused.sum(dim=2, keepdim=True).to(out.dtype)

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert isinstance(state, CacheState)
        self.unused = self.grouped(state.value[:, :, state.length :])
        return keys, values, state


class StatesAreHalfByDefault(StoredAttention):
    """init_state without a dtype makes a store in float16."""

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheState:
        return super().init_state(batch, capacity, device, torch.float16 if dtype is None else dtype)


class StoresHalfPrecision(TextbookAttention):
    """The cache is kept in float16 whatever the keys are."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert isinstance(state, CacheState)
        return keys, values, replace(state, key=keys.half().to(keys.dtype), value=values.half())


class LengthLeavesOutThePadding(TextbookLinear):
    """length counts the tokens that were present, so positions of later tokens fall behind."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        present = None if call.visibility is None else call.visibility.key_present
        if not isinstance(answer.state, LinearState) or present is None:
            return answer
        return answer._replace(state=replace(answer.state, length=int(present.sum(1).max())))


class OtherStatesInTraining(TextbookAttention):
    """While autograd records, the state comes back as another class."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        assert isinstance(state, CacheState)
        if not call.recording:
            return keys, values, state
        kept = {f: getattr(state, f) for f in ("key", "value", "length", "key_present", "key_segments")}
        return keys, values, _TrainingState(**kept)


class _TrainingState(CacheState):
    pass


class TopLeftWithGradients(TextbookAttention):
    """The path for gradients aligns a step of several tokens top-left; the other one is right."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.state is None or not torch.is_grad_enabled():
            return visible
        return visible & torch.ones(shape, dtype=torch.bool, device=device).tril(shape[3] if shape[2] == 1 else 0)


@dataclass(kw_only=True, eq=False)
class _AnyWidth(RecurrentState):
    def check(self, subject: str, *rest: Any) -> None:
        self.memory = self.memory.to(torch.promote_types(self.memory.dtype, torch.float32))
        super().check(subject, *rest)


class MemoryInTheKeysDtype(TextbookDelta):
    """Between calls the memory is kept in the keys' dtype, bfloat16 included."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        kept = _AnyWidth(length=answer.state.length, memory=answer.state.memory.to(key.dtype))
        return answer._replace(state=kept)

    def init_state(self, *args: Any, **kwargs: Any) -> RecurrentState:
        made = super().init_state(*args, **kwargs)
        return _AnyWidth(memory=made.memory)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(WritesIntoAnInferenceStore, "modes_agree_while_decoding", "an inference tensor is written to outside"),
    Mutant(AttendsTheWholeStore, "capacity_changes_nothing", "unused slots are multiplied by 0"),
    Mutant(StatesAreHalfByDefault, "capacity_changes_nothing", "states are float16 unless told otherwise"),
    Mutant(StoresHalfPrecision, "states_keep_length_and_dtype", "a cache in float16"),
    Mutant(LengthLeavesOutThePadding, "states_keep_length_and_dtype", "absent tokens are not counted"),
    Mutant(OtherStatesInTraining, "states_keep_length_and_dtype", "another class of state in training"),
    Mutant(TopLeftWithGradients, "modes_agree_while_decoding", "the recorded path aligns steps top-left"),
    Mutant(MemoryInTheKeysDtype, "states_keep_length_and_dtype", "a memory in the keys' dtype"),
)
