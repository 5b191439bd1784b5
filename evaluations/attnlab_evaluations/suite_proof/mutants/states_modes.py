"""Mutants of what a state must not depend on, and of what a step with a state is asked for. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.state import CacheState, LinearState, State
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear, before_the_gate


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
class _AlwaysInPlace(CacheState):
    def append(
        self, key: Tensor, value: Tensor, *, recording: bool, present: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, CacheState]:
        start, stop = self.length, self.length + key.shape[2]
        self.key[:, :, start:stop], self.value[:, :, start:stop] = key, value
        kept = replace(self, length=stop, spent=False, key_present=present, key_segments=segments)
        return self.key[:, :, :stop], self.value[:, :, :stop], kept


@kept_in(_AlwaysInPlace)
class WritesUnderTheGraph(StoredAttention):
    """A static store is written in place although a graph holds what it held before."""

    def grouped(self, x: Tensor) -> Tensor:
        return x if self.num_heads == self.num_kv_heads else super().grouped(x)

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        return super().init_state(batch, 64 if capacity is None else capacity, *args, **kwargs)


class WritesUnderTheQuerysGraph(StoredAttention):
    """Only a graph of the keys keeps a store from being written: one of the query alone holds it as well."""

    def grouped(self, x: Tensor) -> Tensor:
        return x if self.num_heads == self.num_kv_heads else super().grouped(x)

    def recording(self, call: Call) -> bool:
        return False


class IgnoresTheOffset(TextbookAttention):
    """With a state the queries stand behind the past, whatever offset says."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is not None and seen is not None:
            seen.offset, seen._query_positions = call.state.length, None
        return super().visible(call, shape, device)


class OffsetsCountFromTheStep(TextbookAttention):
    """With a state the past is added to the offset that was given."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is not None and seen is not None:
            seen.offset, seen._query_positions = seen.offset + call.state.length, None
        return super().visible(call, shape, device)


class AbsorbsNothing(TextbookAttention):
    """Keys that come without a query are dropped."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert call.state is not None
        return call.state.renewed()


class AlignsToTheLastKey(TextbookAttention):
    """With a state the last query stands at the last key, also where there are fewer queries than new keys."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is not None and seen is not None:
            seen.offset, seen._query_positions = shape[3] - shape[2], None
        return super().visible(call, shape, device)


class LengthStaysWhereNobodyAsks(TextbookLinear):
    """Keys that come without a query enter the sums and are not counted."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert call.state is not None
        return replace(super().absorb(key, value, call), length=call.state.length)


class ValidLengthsLeaveOutThePast(TextbookAttention):
    """With lengths, bottom right is counted from the new keys as if there were no others."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is not None and seen is not None and isinstance(seen.offset, Tensor):
            seen.offset, seen._query_positions = seen.offset - call.state.length, None
        return super().visible(call, shape, device)


def _note_the_mask(named: dict[str, Any]) -> None:
    named["module"].masked = named.get("key_mask") is not None


@before_the_gate(_note_the_mask)
class ForgetsAMaskThatIsNotRepeated(TextbookAttention):
    """A step without a key_mask takes everything before it for present."""

    masked: bool

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        if call.visibility is not None and not self.masked:
            call.visibility.key_present = None
        return super().visible(call, shape, device)


class WeightsOfTheStep(TextbookAttention):
    """Weights have columns for the new keys only."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if answer.weights is None or call.state is None:
            return answer
        return answer._replace(weights=answer.weights[..., call.state.length :])


class LseOfTheStep(TextbookAttention):
    """lse sums over the new keys only."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        new = s.shape[-2]
        return weights, super().normalised(s[..., -new:], visible[..., -new:], sinks)[1] if self.stepping else lse

    stepping = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.stepping = call.state is not None
        return super().attend(query, key, value, call)


class FirstRowsPadding(TextbookAttention):
    """In a step the padding of the first sequence counts for all of them."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = call.visibility
        if call.state is None or seen is None or seen.key_present is None:
            return super().visible(call, shape, device)
        own, seen.key_present = seen.key_present, seen.key_present[:1]
        visible = super().visible(call, shape, device)
        seen.key_present = own
        return visible


MUTANTS = (
    Mutant(AttendsTheWholeStore, "capacity_changes_nothing", "unused slots are multiplied by 0"),
    Mutant(StatesAreHalfByDefault, "capacity_changes_nothing", "states are float16 unless told otherwise"),
    Mutant(StoresHalfPrecision, "states_keep_length_and_dtype", "a cache in float16"),
    Mutant(LengthLeavesOutThePadding, "states_keep_length_and_dtype", "absent tokens are not counted"),
    Mutant(OtherStatesInTraining, "states_keep_length_and_dtype", "another class of state in training"),
    Mutant(TopLeftWithGradients, "modes_agree_while_decoding", "the recorded path aligns steps top-left"),
    Mutant(WritesUnderTheGraph, "recorded_and_unrecorded_steps_mix", "a store is written under a graph"),
    Mutant(WritesUnderTheQuerysGraph, "recorded_and_unrecorded_steps_mix", "a store is written under a query's graph"),
    Mutant(IgnoresTheOffset, "offsets_count_from_the_first_token", "an offset beside a state is ignored"),
    Mutant(OffsetsCountFromTheStep, "offsets_count_from_the_first_token", "the past is added to an offset"),
    Mutant(AbsorbsNothing, "queries_and_keys_may_come_apart", "keys without queries are dropped"),
    Mutant(AlignsToTheLastKey, "queries_and_keys_may_come_apart", "queries are aligned to the last new key"),
    Mutant(LengthStaysWhereNobodyAsks, "queries_and_keys_may_come_apart", "keys without queries are not counted"),
    Mutant(ValidLengthsLeaveOutThePast, "bottom_right_counts_what_is_valid", "valid lengths leave out the past"),
    Mutant(ForgetsAMaskThatIsNotRepeated, "masks_may_come_and_go", "a mask counts only while it is repeated"),
    Mutant(WeightsOfTheStep, "steps_return_weights_and_lse", "weights leave out the past"),
    Mutant(LseOfTheStep, "steps_return_weights_and_lse", "lse leaves out the past"),
    Mutant(FirstRowsPadding, "batch_items_decode_independently", "one row's padding serves the batch"),
)
