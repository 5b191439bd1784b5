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
    seen_by_chunks,
    step,
    truth,
    up_to,
)
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import Bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import draw
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
    inputs = draw(case, variant)
    sizes = [2, 1, 0, case.query_length - 3]
    for offset in OFFSETS:
        given = torch.tensor(offset, device=case.device)[: case.batch] if isinstance(offset, list) else offset
        moved = inputs.with_tensors(offset=given)
        visible = seen_by_chunks(moved, sizes)
        if not comparable(variant, moved, visible):
            continue
        exact, limit, name = truth(variant, moved, visible)
        try:
            with torch.no_grad():
                got, _ = feed(variant, moved, sizes)
        except InvalidInput:
            if offset in OFFSETS[:2]:
                raise
            continue  # a past that is summed up cannot be looked into from elsewhere
        demand_close(
            got,
            exact,
            limit,
            variant,
            case,
            what="out",
            versus=f"{name} (tokens stand at their index + {offset})",
            advice="offset= is where the call's first query stands, counted from the sequence's first key",
        )


def check_queries_and_keys_may_come_apart(variant: Any, case: Case) -> None:
    """Keys without queries are remembered, queries without new keys are answered, and one call may hold more of either."""
    inputs = draw(case, variant)
    visible = inputs.visible()
    known: dict[int, tuple[Tensor, Bound, str]] = {}
    for word, calls in APART:
        state = fresh(variant, inputs, case.key_length)
        for queries, keys in calls:
            with torch.no_grad():
                answer = call(variant, inputs, queries, keys, state)
            state = answer.state
            demand(
                state.length == keys[1],
                variant,
                case,
                f"after {keys[1]} keys the state's length is {state.length} ({word})",
                "length counts keys, whoever asks",
            )
            seen, rows = up_to(visible, torch.tensor([keys[1]], device=visible.device)), slice(*queries)
            if not is_defined(variant, inputs):
                if not torch.equal(seen[:, :, rows], visible[:, :, rows]):
                    continue
                seen = visible
            if keys[1] not in known:
                known[keys[1]] = truth(variant, inputs, seen)
            exact, limit, name = known[keys[1]]
            demand_close(
                answer.out,
                exact[:, :, rows],
                limit,
                variant,
                case,
                what="out",
                versus=f"{name} ({word}: queries {list(range(*queries))} with new keys {list(range(*keys))})",
                advice="A state grows by the new keys, whoever asks; write absorb() for calls without queries. "
                + ADVICE,
            )


def check_bottom_right_counts_what_is_valid(variant: Any, case: Case) -> None:
    """With a state, offset="bottom_right" and lengths, the last valid query stands at the last valid key."""
    inputs = draw(case, variant)
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
    demand_close(
        got,
        exact[:, :, past:],
        limit,
        variant,
        case,
        what="out",
        versus=f"{name} ({new} tokens after {past}, of which {keys.tolist()} keys and {queries.tolist()} queries are valid)",
        advice="bottom_right is the past and the valid new keys less the valid queries",
    )


def _offset_cases(scope: Scope) -> Iterable[Case]:
    yield case("causal", needs=NEEDS, dtype=scope.base)
    if not scope.quick:
        yield case("left_window", "causal", needs=NEEDS, dtype=scope.base)
        yield case("window", needs=("state",), dtype=scope.base)
        yield case("causal", "key_mask_left", "gqa", needs=NEEDS, dtype=scope.base)
        yield case("causal", "score_mod", needs=NEEDS, dtype=scope.base)
        yield case("causal", "mask_mod", needs=NEEDS, dtype=scope.base)


def _apart_cases(scope: Scope) -> Iterable[Case]:
    needs = (*NEEDS, "cross_lengths")
    yield case("causal", needs=needs, dtype=scope.base)
    if not scope.quick:
        for label in ("key_mask_left", "gqa", "left_window", "score_mod", "mask_of_each", "bias_of_each"):
            yield case("causal", label, needs=needs, dtype=scope.base)


def _valid(scope: Scope) -> Iterable[Case]:
    needs = (*NEEDS, "key_mask")
    yield case("causal", needs=needs, dtype=scope.base)
    if not scope.quick:
        yield case("left_window", needs=needs, dtype=scope.base)


CHECKS = (
    Check(check_offsets_count_from_the_first_token, "state", _offset_cases),
    Check(check_queries_and_keys_may_come_apart, "state", _apart_cases),
    Check(check_bottom_right_counts_what_is_valid, "state", _valid),
)
