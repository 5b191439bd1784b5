"""Padding while decoding, and the weights and lse of steps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from attnlab.conformance.checks._stepping import ADVICE, NEEDS, feed, fresh, step, steps, truth, visible_by_chunks
from attnlab.conformance.checks.independence import item
from attnlab.conformance.checks.padding import CONTENTS, filled
from attnlab.conformance.checks.state import causal_cases, chunked_gradients
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.oracle.cases import Case, case
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


def check_steps_return_weights_and_lse(variant: Any, case: Case) -> None:
    """With a state weights are [B, Hq, Lq, past + new] and lse is over past and new, as in the whole."""
    inputs, compare = drawn(case, variant)
    sizes = [2, 0, 1, case.query_length - 3]
    visible = visible_by_chunks(inputs, sizes)
    for what in (what for what in ("weights", "lse") if what in case.needs):
        exact, limit, name = truth(variant, inputs, visible, what)
        with torch.no_grad():
            fed = list(steps(variant, inputs, sizes, fresh(variant, inputs), **{f"need_{what}": True}))
        for start, stop, answer in fed:
            expected = exact[:, :, start:stop]
            expected = expected[..., :stop] if what == "weights" else expected
            versus = f"{name} (a step of tokens {start} to {stop - 1} after {start} past ones)"
            advice = "Weights have a column, and lse a term, for every past and new key"
            compare.close(getattr(answer, what), expected, limit, versus, advice, what=what)


def check_batch_items_decode_independently(variant: Any, case: Case) -> None:
    """Sequences of different lengths, padded and decoded together, give what each gives alone."""
    inputs, compare = drawn(case, variant)
    sizes = [3, 1, case.query_length - 4]
    advice = "Every item has its own past: lengths, masks and sums are kept by row"
    with torch.no_grad():
        together, _ = feed(variant, inputs, sizes, case.query_length)
        for b in range(case.batch):
            alone, _ = feed(variant, item(inputs, b), sizes, case.query_length)
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


def _with_weights(scope: Scope) -> Iterable[Case]:
    more = ("gqa", "sinks", "left_window", "mask", "mask_of_each", "hiding_bias", "score_mod", "softcap", "segments")
    for what in ("weights", "lse"):
        labels = ("", "key_mask_left", *(() if scope.quick else more))
        yield from causal_cases(scope, *labels, needs=(*NEEDS, what), note=what)
        for dtype in () if scope.quick else scope.other_dtypes:
            yield case("causal", needs=(*NEEDS, what), dtype=dtype, note=what)


def _items(scope: Scope) -> Iterable[Case]:
    labels: tuple[str, ...] = ("key_mask_left", "key_mask_right", "key_mask_holes", "key_lengths", "segments")
    labels += ("mask_of_each", "bias_of_each", "mask_mod", "score_mod")
    return causal_cases(scope, *(labels[:2] if scope.quick else labels), "", batch=3)


def _padded(scope: Scope) -> Iterable[Case]:
    few = ("key_mask_left", "key_mask_holes", "segments")
    yield from causal_cases(scope, *few, *(() if scope.quick else ("key_mask_right", "key_lengths", "query_lengths")))
    for dtype in scope.dtypes[-1:] if scope.quick else scope.dtypes:
        yield from causal_cases(scope, "key_mask_left", dtype=dtype)


CHECKS = (
    Check(check_key_mask_may_be_given_for_some_steps, "state", _come_and_go),
    Check(check_arguments_apply_to_their_step_alone, "state", _passing),
    Check(check_steps_return_weights_and_lse, "state", _with_weights),
    Check(check_batch_items_decode_independently, "state", _items),
    Check(check_padding_does_not_affect_states, "state", _padded),
)
