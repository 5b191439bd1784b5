"""Where the tokens of a step stand: offsets, queries without new keys, keys without queries. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import (
    ADVICE,
    NEEDS,
    Span,
    call,
    comparable,
    feed,
    fresh,
    is_defined,
    step,
    truth,
    up_to,
    visible_by_chunks,
)
from attnlab.conformance.checks.state import causal_cases
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.compare.tolerances import Bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput

OFFSETS: tuple[str | int | list[int], ...] = ("bottom_right", 0, 1, -1, -2, -3, [1, -1, 0])
"""Where the first token of a sequence stands; the first two say what holds without an offset."""
APART: tuple[tuple[str, tuple[tuple[Span, Span], ...]], ...] = (
    ("keys first, then their queries", (((0, 0), (0, 4)), ((4, 7), (4, 7)))),
    ("a query asked again, without new keys", (((0, 3), (0, 3)), ((2, 3), (3, 3)), ((3, 7), (3, 7)))),
    ("a prompt of which only the last query is asked", (((3, 4), (0, 4)), ((4, 5), (4, 5)))),
    ("fewer queries than keys", (((0, 2), (0, 2)), ((2, 4), (2, 6)), ((6, 7), (6, 7)))),
    ("more queries than keys", (((0, 5), (0, 3)), ((3, 7), (3, 7)))),
    ("queries before any key", (((0, 2), (0, 0)), ((0, 7), (0, 7)))),
)
"""Calls whose queries and new keys are other tokens: in words, spans of queries and of keys."""


def check_offsets_count_from_the_first_token(variant: Any, case: Case) -> None:
    """An offset given with a state says where the call's first query stands in the whole, the past included."""
    inputs, compare = drawn(case, variant)
    sizes = [2, 1, 0, case.query_length - 3]
    for offset in OFFSETS:
        by_item = isinstance(offset, list)
        moved = inputs.with_tensors(
            offset=torch.tensor(offset, device=case.device)[: case.batch] if by_item else offset
        )
        visible = visible_by_chunks(moved, sizes)
        if not comparable(variant, moved, visible):
            continue
        exact, limit, name = truth(variant, moved, visible)
        try:
            with torch.no_grad():
                got, _ = feed(variant, moved, sizes)
        except InvalidInput:
            if offset in OFFSETS[:2]:
                raise
            continue  # a past that is summed up has no other positions to read from
        advice = "offset= is where the call's first query stands, counted from the sequence's first key"
        compare.close(got, exact, limit, f"{name} (tokens stand at their index + {offset})", advice)


def check_queries_and_keys_of_a_step_may_differ(variant: Any, case: Case) -> None:
    """Keys without queries are remembered, queries without new keys are answered, and one call may hold more of either."""
    inputs, compare = drawn(case, variant)
    whole = inputs.visible()
    known: dict[int, tuple[Tensor, Bound, str]] = {}
    advice = f"A state grows by the new keys, whoever asks; write absorb() for calls without queries. {ADVICE}"
    for words, calls in APART:
        state = fresh(variant, inputs, case.key_length)
        for queries, keys in calls:
            with torch.no_grad():
                answer = call(variant, inputs, queries, keys, state)
            state = answer.state
            fault = f"after {keys[1]} keys the state's length is {state.length} ({words})"
            compare.demand(state.length == keys[1], fault, "length counts keys, whoever asks")
            visible, rows = up_to(whole, torch.tensor([keys[1]], device=whole.device)), slice(*queries)
            if not is_defined(variant, inputs):
                if not torch.equal(visible[:, :, rows], whole[:, :, rows]):
                    continue
                visible = whole
            if keys[1] not in known:
                known[keys[1]] = truth(variant, inputs, visible)
            exact, limit, name = known[keys[1]]
            versus = f"{name} ({words}: queries {list(range(*queries))} with new keys {list(range(*keys))})"
            compare.close(answer.out, exact[:, :, rows], limit, versus, advice)


def check_bottom_right_counts_valid_tokens(variant: Any, case: Case) -> None:
    """With a state, offset="bottom_right" and lengths, the last valid query stands at the last valid key."""
    inputs, compare = drawn(case, variant)
    n, past = case.query_length, 3
    new = n - past
    keys, queries = (torch.tensor(x, device=case.device) for x in ([new, new - 2], [new - 1, new]))
    present = torch.arange(n, device=case.device) < past + keys[:, None]
    whole = inputs.with_tensors(offset=keys - queries, key_mask=present, query_lengths=past + queries)
    exact, limit, name = truth(variant, whole)
    lengths = {"key_lengths": keys, "query_lengths": queries}
    with torch.no_grad():
        _, state = feed(variant, inputs, [past])
        try:
            got = step(variant, inputs, past, n, state, offset="bottom_right", **lengths).out
        except InvalidInput as refusal:
            raise NotApplicable(f"its past is summed up: {refusal}") from None
    valid = f"{keys.tolist()} keys and {queries.tolist()} queries are valid"
    versus = f"{name} ({new} tokens after {past}, of which {valid})"
    advice = "bottom_right is the past and the valid new keys less the valid queries"
    compare.close(got, exact[:, :, past:], limit, versus, advice)


def _offset_cases(scope: Scope) -> Iterable[Case]:
    yield from causal_cases(scope, "")
    if not scope.quick:
        yield from scope.cases("left_window+causal", needs=NEEDS)
        yield from scope.cases("window", needs=("state",))
        yield from causal_cases(scope, "key_mask_left+gqa", "score_mod", "mask_mod")


def _apart_cases(scope: Scope) -> Iterable[Case]:
    more = ("key_mask_left", "gqa", "left_window", "score_mod", "mask_of_each", "bias_of_each")
    return causal_cases(scope, "", *(() if scope.quick else more), needs=(*NEEDS, "cross_lengths"))


def _valid(scope: Scope) -> Iterable[Case]:
    return scope.cases(*(("causal",) if scope.quick else ("causal", "left_window")), needs=(*NEEDS, "key_mask"))


CHECKS = (
    Check(check_offsets_count_from_the_first_token, "state", _offset_cases),
    Check(check_queries_and_keys_of_a_step_may_differ, "state", _apart_cases),
    Check(check_bottom_right_counts_valid_tokens, "state", _valid),
)
