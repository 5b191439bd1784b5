"""Padding while decoding, and the weights and lse of steps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._stepping import ADVICE, NEEDS, feed, fresh, step, truth
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.checks.padding import CONTENTS, filled
from attnlab.conformance.checks.state import causal_cases, chunked_gradients
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.features import feature
from attnlab.conformance.running.check import Check, Scope

FIRST_OR_SECOND = ((True, False, False), (False, True, False))
"""Which of three steps an argument is given with."""


def check_key_mask_may_be_given_for_some_steps(variant: Any, case: Case) -> None:
    """A key_mask given with some steps only: tokens that came without one are present, padding stays padding."""
    inputs, compare = drawn(case, variant)
    n, key_mask = case.query_length, inputs.arguments["key_mask"]
    bare = inputs.without("key_mask")
    spans = ((0, 3), (3, 5), (5, n))
    advice = "Join past and new masks where either has one; a side without a mask is present throughout"
    for words, masked in zip(("the prompt", "a later step"), FIRST_OR_SECOND, strict=True):
        present = torch.cat([key_mask[:, a:b] | (not on) for (a, b), on in zip(spans, masked, strict=True)], dim=1)
        exact, limit, name = truth(variant, inputs.with_tensors(key_mask=present))
        state, parts = fresh(variant, inputs, n), []
        for (start, stop), on in zip(spans, masked, strict=True):
            with torch.no_grad():
                answer = step(variant, inputs if on else bare, start, stop, state)
            state = answer.state
            parts.append(answer.out)
        compare.close(torch.cat(parts, dim=2), exact, limit, f"{name} (key_mask given with {words} only)", advice)


def check_arguments_apply_to_their_step_alone(variant: Any, case: Case) -> None:
    """A window, mask, bias, scale ... given with some steps only: those steps heed it, and it leaves no trace in the state."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    bare = inputs.without(*(x for x in inputs.arguments if x not in ("causal", "gates")))
    spans = ((0, 3), (3, 5), (5, n))
    known = {on: truth(variant, inputs if on else bare) for on in (True, False)}
    advice = "The arguments of a call hold for that call: a state keeps keys, values and padding, nothing else"
    for with_argument in FIRST_OR_SECOND:
        state = fresh(variant, inputs, n)
        with_it = [span for span, on in zip(spans, with_argument, strict=True) if on]
        for (start, stop), on in zip(spans, with_argument, strict=True):
            with torch.no_grad():
                answer = step(variant, inputs if on else bare, start, stop, state)
            state = answer.state
            exact, limit, name = known[on]
            versus = f"{name} (tokens {start} to {stop - 1}; {case.features[-1]} is given with {with_it} only)"
            compare.close(answer.out, exact[:, :, start:stop], limit, versus, advice)


def check_batch_items_decode_independently(variant: Any, case: Case) -> None:
    """Sequences of different lengths, padded and decoded together, give what each gives alone."""
    inputs, compare = drawn(case, variant)
    sizes = [3, 1, case.query_length - 4]
    advice = "Every item has its own past: lengths, masks and sums are kept by row"
    with torch.no_grad():
        together, _ = feed(variant, inputs, sizes, case.query_length)
        for b in range(case.batch):
            alone, _ = feed(variant, inputs.take(b=[b]), sizes, case.query_length)
            compare.same(together[b : b + 1], alone, f"item {b} decoded alone", advice)


def check_padding_does_not_affect_states(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in the padding of one step change no later step, nor (where declared) any gradient."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    clean = filled(inputs, 0.0)
    with torch.no_grad():
        expected, _ = feed(variant, clean, [3, n - 3])
        for content, sizes, capacity in (*((x, [3, n - 3], None) for x in CONTENTS), (CONTENTS[0], [1] * n, n)):
            got, _ = feed(variant, filled(inputs, content), sizes, capacity)
            compare.same(got, expected, f"the run with 0 instead of {content} in padding (capacity {capacity})", ADVICE)
    if variant.capabilities.backward:
        exact, dirty = (chunked_gradients(variant, x, [3, n - 3]) for x in (clean, filled(inputs, CONTENTS[0])))
        compare.same_gradients(dirty, exact, f"the run with 0 instead of {CONTENTS[0]} in padding", ADVICE)


def _come_and_go(scope: Scope) -> Iterable[Case]:
    yield from causal_cases(scope, "key_mask_left", "key_mask_holes+gqa")
    if not scope.quick:
        yield from scope.cases("key_mask_holes+left_window+causal", needs=NEEDS)


def _passing(scope: Scope) -> Iterable[Case]:
    labels = ("left_window", "mask_of_each", "bias_of_each", "scale", "softcap", "score_mod", "mask_mod", "sinks")
    return causal_cases(scope, *(labels[:1] if scope.quick else labels))


def _items(scope: Scope) -> Iterable[Case]:
    yield from causal_cases(scope, "", "key_mask_left", batch=3)
    yield from (replace(one, batch=3) for one in causal_requests(scope, full=30, quick=8, seed=29000))


def _padded(scope: Scope) -> Iterable[Case]:
    yield from causal_cases(scope, "key_mask_left", "key_mask_holes", "segments")
    for one in causal_requests(scope, full=60, quick=12, seed=28000):
        if HAS_PADDING & {name for label in one.features for name in feature(label).sets}:
            yield one
    for dtype in scope.other_dtypes:
        yield from causal_cases(scope, "key_mask_left", dtype=dtype)


HAS_PADDING = frozenset({"key_mask", "key_lengths", "query_lengths", "segments"})


CHECKS = (
    Check(check_key_mask_may_be_given_for_some_steps, "state", _come_and_go),
    Check(check_arguments_apply_to_their_step_alone, "state", _passing),
    Check(check_batch_items_decode_independently, "state", _items),
    Check(check_padding_does_not_affect_states, "state", _padded),
)
