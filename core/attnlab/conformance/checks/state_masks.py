"""Padding while decoding, and the weights and lse of steps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import ADVICE, NEEDS, feed, fresh, same, seen_by_chunks, step, truth
from attnlab.conformance.checks.absent import CONTENTS, filled
from attnlab.conformance.checks.independence import item
from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope


def check_masks_may_come_and_go(variant: Any, case: Case) -> None:
    """A key_mask given with some steps only: tokens that came without one are present, absent ones stay absent."""
    inputs = draw(case, variant)
    n, given = case.query_length, inputs.arguments["key_mask"]
    bare = replace(inputs, arguments={x: y for x, y in inputs.arguments.items() if x != "key_mask"})
    spans = ((0, 3), (3, 5), (5, n))
    for word, masked in (("the prompt", (True, False, False)), ("a later step", (False, True, False))):
        told = torch.cat([given[:, a:b] | (not on) for (a, b), on in zip(spans, masked, strict=True)], dim=1)
        exact, limit, name = truth(variant, inputs.with_tensors(key_mask=told))
        state, parts = fresh(variant, inputs, n), []
        for (start, stop), on in zip(spans, masked, strict=True):
            with torch.no_grad():
                answer = step(variant, inputs if on else bare, start, stop, state)
            state = answer.state
            parts.append(answer.out)
        demand_close(
            torch.cat(parts, dim=2),
            exact,
            limit,
            variant,
            case,
            what="out",
            versus=f"{name} (key_mask given with {word} only)",
            advice="Join past and new masks where either has one; a side without a mask is present throughout",
        )


def check_arguments_hold_for_their_step(variant: Any, case: Case) -> None:
    """A window, mask, bias, scale ... given with some steps only: those steps heed it, and it leaves no trace in the state."""
    inputs = draw(case, variant)
    n = case.query_length
    bare = replace(inputs, arguments={x: y for x, y in inputs.arguments.items() if x in ("causal", "gates")})
    spans = ((0, 3), (3, 5), (5, n))
    told = {on: truth(variant, inputs if on else bare) for on in (True, False)}
    for given in ((True, False, False), (False, True, False)):
        state = fresh(variant, inputs, n)
        for (start, stop), on in zip(spans, given, strict=True):
            with torch.no_grad():
                answer = step(variant, inputs if on else bare, start, stop, state)
            state = answer.state
            exact, limit, name = told[on]
            with_it = [span for span, now in zip(spans, given, strict=True) if now]
            demand_close(
                answer.out,
                exact[:, :, start:stop],
                limit,
                variant,
                case,
                what="out",
                versus=f"{name} (tokens {start} to {stop - 1}; {case.features[-1]} is given with {with_it} only)",
                advice="What a call is told holds for that call: a state keeps keys, values and absent slots, nothing else",
            )


def check_steps_return_weights_and_lse(variant: Any, case: Case) -> None:
    """With a state weights are [B, Hq, Lq, past + new] and lse is over past and new, as in the whole."""
    inputs = draw(case, variant)
    sizes = [2, 0, 1, case.query_length - 3]
    visible = seen_by_chunks(inputs, sizes)
    for what in ("weights", "lse"):
        if what not in case.needs:
            continue
        exact, limit, name = truth(variant, inputs, visible, what)
        state, start = fresh(variant, inputs), 0
        for size in sizes:
            stop = start + size
            with torch.no_grad():
                answer = step(variant, inputs, start, stop, state, **{f"need_{what}": True})
            state = answer.state
            expected = exact[:, :, start:stop]
            demand_close(
                getattr(answer, what),
                expected[..., :stop] if what == "weights" else expected,
                limit,
                variant,
                case,
                what=what,
                versus=f"{name} (a step of tokens {start} to {stop - 1} after {start} past ones)",
                advice="Weights have a column, and lse a term, for every past and new key",
            )
            start = stop


def check_batch_items_decode_independently(variant: Any, case: Case) -> None:
    """Sequences of different lengths, padded and decoded together, give what each gives alone."""
    inputs = draw(case, variant)
    sizes = [3, 1, case.query_length - 4]
    with torch.no_grad():
        together, _ = feed(variant, inputs, sizes, case.query_length)
        for b in range(case.batch):
            alone, _ = feed(variant, item(inputs, b), sizes, case.query_length)
            same(
                variant,
                inputs,
                together[b : b + 1],
                alone,
                f"item {b} decoded alone",
                "Every item has its own past: lengths, masks and sums are kept by row",
            )


def check_absent_slots_reach_no_state(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in the absent slots of one step change no later step, nor (where declared) any gradient."""
    inputs = draw(case, variant)
    n = case.query_length
    clean = filled(inputs, 0.0)
    with torch.no_grad():
        expected, _ = feed(variant, clean, [3, n - 3])
        for content, sizes, capacity in (
            *((content, [3, n - 3], None) for content in CONTENTS),
            (CONTENTS[0], [1] * n, n),
        ):
            same(
                variant,
                inputs,
                feed(variant, filled(inputs, content), sizes, capacity)[0],
                expected,
                f"the run with 0 instead of {content} in absent slots (capacity {capacity})",
            )
    if not variant.capabilities.backward:
        return
    exact = _slopes(variant, clean)
    for name, got in _slopes(variant, filled(inputs, CONTENTS[0])).items():
        size = max(largest(exact[name]), largest(direction_for(inputs)) * largest(inputs.value))
        demand_close(
            got,
            exact[name],
            rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus=f"the run with 0 instead of {CONTENTS[0]} in absent slots",
            advice=ADVICE,
        )


def _slopes(variant: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Gradients by input of a run in two chunks."""
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        out, _ = feed(variant, inputs.rebuilt(leaves), [3, inputs.case.query_length - 3])
        found = torch.autograd.grad(
            out, list(leaves.values()), direction_for(inputs), allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))


def _come_and_go(scope: Scope) -> Iterable[Case]:
    for labels in (("key_mask_left",), ("key_mask_holes", "gqa")):
        yield case("causal", *labels, needs=NEEDS, dtype=scope.base)
    if not scope.quick:
        yield case("key_mask_holes", "left_window", "causal", needs=NEEDS, dtype=scope.base)


def _passing(scope: Scope) -> Iterable[Case]:
    labels = ("left_window", "mask_of_each", "bias_of_each", "scale", "softcap", "score_mod", "mask_mod", "sinks")
    for label in labels[:1] if scope.quick else labels:
        yield case("causal", label, needs=NEEDS, dtype=scope.base)


def _asked(scope: Scope) -> Iterable[Case]:
    labels = ["", "key_mask_left"]
    if not scope.quick:
        labels += ["gqa", "sinks", "left_window", "mask", "mask_of_each", "hiding_bias", "score_mod", "softcap"]
        labels += ["segments"]
    for what in ("weights", "lse"):
        for label in labels:
            yield case("causal", *([label] if label else []), needs=(*NEEDS, what), dtype=scope.base, note=what)
        if not scope.quick:
            for dtype in scope.dtypes:
                if dtype != scope.base:
                    yield case("causal", needs=(*NEEDS, what), dtype=dtype, note=what)


def _items(scope: Scope) -> Iterable[Case]:
    labels = ["key_mask_left", "key_mask_right", "key_mask_holes", "key_lengths", "segments"]
    labels += ["mask_of_each", "bias_of_each", "mask_mod", "score_mod"]
    for label in labels[:2] if scope.quick else labels:
        yield case("causal", label, needs=NEEDS, dtype=scope.base, batch=3)
    yield case("causal", needs=NEEDS, dtype=scope.base, batch=3)


def _padded(scope: Scope) -> Iterable[Case]:
    few = ("key_mask_left", "key_mask_holes", "segments")
    for label in few if scope.quick else (*few, "key_mask_right", "key_lengths", "query_lengths"):
        yield case("causal", label, needs=NEEDS, dtype=scope.base)
    for dtype in scope.dtypes[-1:] if scope.quick else scope.dtypes:
        yield case("causal", "key_mask_left", needs=NEEDS, dtype=dtype)


CHECKS = (
    Check(check_masks_may_come_and_go, "state", _come_and_go),
    Check(check_arguments_hold_for_their_step, "state", _passing),
    Check(check_steps_return_weights_and_lse, "state", _asked),
    Check(check_batch_items_decode_independently, "state", _items),
    Check(check_absent_slots_reach_no_state, "state", _padded),
)
