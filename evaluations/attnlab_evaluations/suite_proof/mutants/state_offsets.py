"""Mutants that the checks in `checks/state_offsets.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab import Call, RecurrentAttention, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear


class IgnoresTheOffset(TextbookAttention):
    """With a state the queries stand behind the past, whatever offset says."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is not None and visibility is not None:
            visibility.offset, visibility._query_positions = call.state.length, None
        return super().visible(call, shape, device)


class OffsetsCountFromTheStep(TextbookAttention):
    """With a state the past is added to the offset that was given."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is not None and visibility is not None:
            visibility.offset, visibility._query_positions = visibility.offset + call.state.length, None
        return super().visible(call, shape, device)


class AbsorbsNothing(TextbookAttention):
    """Keys that come without a query are dropped."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert call.state is not None
        return call.state.renewed()


class AlignsToTheLastKey(TextbookAttention):
    """With a state the last query stands at the last key, also where there are fewer queries than new keys."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is not None and visibility is not None:
            visibility.offset, visibility._query_positions = shape[3] - shape[2], None
        return super().visible(call, shape, device)


class LengthStaysWhereNobodyAsks(TextbookLinear):
    """Keys that come without a query enter the sums and are not counted."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert call.state is not None
        return replace(super().absorb(key, value, call), length=call.state.length)


class ValidLengthsLeaveOutThePast(TextbookAttention):
    """With lengths, bottom right is counted from the new keys as if there were no others."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is not None and visibility is not None and isinstance(visibility.offset, Tensor):
            visibility.offset, visibility._query_positions = visibility.offset - call.state.length, None
        return super().visible(call, shape, device)


class AbsorbsWithoutGates(TextbookDelta):
    """Tokens without queries are written with full strength."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        gates = {n: torch.ones_like(g) for n, g in (call.gates or {}).items()}
        return RecurrentAttention.absorb(self, key, value, Call(call.visibility, gates=gates, state=call.state))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(IgnoresTheOffset, "offsets_count_from_the_first_token", "an offset beside a state is ignored"),
    Mutant(OffsetsCountFromTheStep, "offsets_count_from_the_first_token", "the past is added to an offset"),
    Mutant(AbsorbsNothing, "queries_and_keys_of_a_step_may_differ", "keys without queries are dropped"),
    Mutant(AlignsToTheLastKey, "queries_and_keys_of_a_step_may_differ", "queries are aligned to the last new key"),
    Mutant(LengthStaysWhereNobodyAsks, "queries_and_keys_of_a_step_may_differ", "keys without queries are not counted"),
    Mutant(ValidLengthsLeaveOutThePast, "bottom_right_counts_valid_tokens", "valid lengths leave out the past"),
    Mutant(AbsorbsWithoutGates, "queries_and_keys_of_a_step_may_differ", "keys without queries ignore their gates"),
)
