"""Mutants of what passes from one call to the next: stores, what a step was told, modes, generators. Needs torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.state import CacheState, State
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class DropsNothingWhileDecoding(TextbookAttention):
    """dropout_p is ignored where a state is given."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.state is not None:
            call.dropout_p = 0.0
        return super().attend(query, key, value, call)


class StepsDropNewKeysOnly(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.past = 0 if call.state is None else call.state.length
        return super().attend(query, key, value, call)

    def dropped(self, weights: Tensor, p: float) -> Tensor:
        used = super().dropped(weights, p)
        return torch.cat([weights[..., : self.past], used[..., self.past :]], -1)


@dataclass(kw_only=True, eq=False)
class _Unborrowed(CacheState):
    def _borrowed(self) -> bool:
        return False


@kept_in(_Unborrowed)
class WritesIntoAnInferenceStore(StoredAttention):
    """A store made in inference mode is written to outside of it."""


class EvictsBehindTheWindow(TextbookAttention):
    """What lies behind a step's window is forgotten, also by steps without that window."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        seen = call.visibility
        if seen is None or seen.left is None or seen.query_segments is not None:
            return keys, values, state
        near = torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - seen.left
        near = near.expand(keys.shape[0], -1)
        held = near if state.key_present is None else near & state.key_present
        return keys, values, replace(state, key_present=held)


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


class AveragesWhileTraining(TextbookAttention):
    """A recorded call in training moves a temperature that every later call uses."""

    moved = 1.0

    def scale(self, call: Call) -> float:
        scale = super().scale(call) * self.moved
        if self.training and call.recording:
            self.moved *= 0.99
        return scale


class TrainsKeysAtHalfTheRate(TextbookAttention):
    """In training mode half of what reaches the keys is lost backward."""

    def grouped(self, x: Tensor) -> Tensor:
        x = super().grouped(x)
        return x.detach() / 2 + x / 2 if self.training else x


class SeedsPython(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        random.seed(0)
        return super().attend(query, key, value, call)


class SeedsWhenItIsMade(TextbookAttention):
    def __init__(self, **sizes: Any) -> None:
        torch.manual_seed(0)
        super().__init__(**sizes)


class SetsThePrecisionWhenItIsMade(TextbookAttention):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        torch.set_float32_matmul_precision("high")


class LeavesGradientsOnAfterAFault(TextbookAttention):
    """A mode is set around the scores and put back, though not where they fail."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        found = super().modified(s, call)
        torch.set_grad_enabled(was)
        return found if was else found.detach()


MUTANTS = (
    Mutant(DropsNothingWhileDecoding, "dropout_reaches_past_and_new_keys", "dropout_p is ignored beside a state"),
    Mutant(StepsDropNewKeysOnly, "dropout_reaches_past_and_new_keys", "past keys are never dropped"),
    Mutant(WritesIntoAnInferenceStore, "modes_agree_while_decoding", "an inference tensor is written to outside"),
    Mutant(EvictsBehindTheWindow, "arguments_hold_for_their_step", "one step's window forgets for all"),
    Mutant(ClonesTakeTheWholeStore, "copies_of_cropped_states_continue", "a clone brings cropped tokens back"),
    Mutant(ReordersTakeTheWholeStore, "copies_of_cropped_states_continue", "beams bring cropped tokens back"),
    Mutant(AveragesWhileTraining, "modes_agree", "training calls move what later calls use"),
    Mutant(TrainsKeysAtHalfTheRate, "modes_agree", "another backward in training mode"),
    Mutant(SeedsPython, "calls_leave_settings_alone", "random.seed() in a forward"),
    Mutant(SeedsWhenItIsMade, "calls_leave_settings_alone", "torch.manual_seed() in a constructor"),
    Mutant(SetsThePrecisionWhenItIsMade, "calls_leave_settings_alone", "a setting changed by a constructor"),
    Mutant(LeavesGradientsOnAfterAFault, "calls_leave_settings_alone", "a mode that is not put back after a fault"),
)
