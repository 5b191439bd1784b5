"""Mutants that the checks in `checks/state_masks.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import Call, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.mutants._shared import before_validation


class EvictsBehindTheWindow(TextbookAttention):
    """What lies behind a step's window is forgotten, also by steps without that window."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        visibility = call.visibility
        if visibility is None or visibility.left is None or visibility.query_segments is not None:
            return keys, values, state
        near = torch.arange(keys.shape[2], device=keys.device) >= keys.shape[2] - visibility.left
        near = near.expand(keys.shape[0], -1)
        held = near if state.key_present is None else near & state.key_present
        return keys, values, replace(state, key_present=held)


def _keep_raw(named: dict[str, Any]) -> None:
    named["module"].raw = (named["key"], named["value"])


@before_validation(_keep_raw)
class RemembersWhatTheGateCleaned(TextbookAttention):
    raw: tuple[Tensor, Tensor]

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        return super().remember(*self.raw, call)


def _note_the_mask(named: dict[str, Any]) -> None:
    named["module"].masked = named.get("key_mask") is not None


@before_validation(_note_the_mask)
class ForgetsAMaskThatIsNotRepeated(TextbookAttention):
    """A step without a key_mask takes everything before it for present."""

    masked: bool

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        if call.visibility is not None and not self.masked:
            call.visibility.key_present = None
        return super().visible(call, shape, device)


class FirstRowsPadding(TextbookAttention):
    """In a step the padding of the first sequence counts for all of them."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is None or visibility is None or visibility.key_present is None:
            return super().visible(call, shape, device)
        own, visibility.key_present = visibility.key_present, visibility.key_present[:1]
        visible = super().visible(call, shape, device)
        visibility.key_present = own
        return visible


MUTANTS: tuple[Mutant, ...] = (
    Mutant(EvictsBehindTheWindow, "arguments_apply_to_their_step_alone", "one step's window forgets for all"),
    Mutant(RemembersWhatTheGateCleaned, "padding_does_not_affect_states", "uncleaned tensors enter the store"),
    Mutant(
        ForgetsAMaskThatIsNotRepeated, "key_mask_may_be_given_for_some_steps", "a mask counts only while it is repeated"
    ),
    Mutant(FirstRowsPadding, "batch_items_decode_independently", "one row's padding serves the batch"),
)
