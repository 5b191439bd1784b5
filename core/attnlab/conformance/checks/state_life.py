"""A state's life: used once, kept by calls that fail, refused where it does not fit, never full in silence. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import NEEDS, call, comparable, feed, fresh, step, truth, visible_by_chunks
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.checks.independence import item
from attnlab.conformance.checks.state import causal_cases
from attnlab.conformance.compare.comparer import drawn, short
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like
from attnlab.errors import AttnlabError, InvalidInput
from attnlab.state import CacheState, LinearState, RecurrentState, State

LIBRARY = (CacheState, LinearState, RecurrentState)


class Interrupted(Exception):
    """Raised by a caller's function in the middle of a call."""


def check_used_states_are_refused(variant: Any, case: Case) -> None:
    """A state that was handed to a call, even to one without tokens or without queries, cannot be used again."""
    inputs, compare = drawn(case, variant)
    for words, queries, keys in (
        ("two tokens", (0, 2), (0, 2)),
        ("no tokens", (0, 0), (0, 0)),
        ("keys alone", (0, 0), (0, 2)),
    ):
        for recording in (False, variant.capabilities.backward):
            state = fresh(variant, inputs)
            first = inputs.with_tensors(query=inputs.query.clone().requires_grad_(recording))
            with torch.set_grad_enabled(recording):
                call(variant, first, queries, keys, state)
            try:
                with torch.no_grad():
                    step(variant, inputs, keys[1], 3, state)
            except AttnlabError:
                continue
            advice = "Mark it spent and raise InvalidInput on the second use"
            compare.fail(f"a state was accepted twice, first with {words}", advice)


def check_failed_calls_leave_the_state_usable(variant: Any, case: Case) -> None:
    """A call that raises, at the door or in the middle, leaves its state as it was."""
    inputs, compare = drawn(case, variant)
    other = inputs.rebuilt(draw(replace(case, seed=case.seed + 17), variant).tensors())
    n = case.query_length
    with torch.no_grad():
        expected = feed(variant, inputs, [3, n - 3])[0][:, :, 3:]
        for words, attempt in _failing(variant, other):
            _, state = feed(variant, inputs, [3], n)
            if _succeeds(attempt, state):
                continue
            try:
                got = step(variant, inputs, 3, n, state).out
            except AttnlabError as fault:
                compare.fail(
                    f"after a call that failed ({words}) the state is refused: {fault}",
                    "A state is spent by the call that succeeds, and only when it does",
                )
            advice = "Change a state only when nothing can fail any more, or make a new one"
            compare.same(got, expected, f"the run without the call that failed ({words})", advice)


def check_mismatched_states_are_refused(variant: Any, case: Case) -> None:
    """A state for another batch, other heads or widths, another kind or another dtype raises `InvalidInput`."""
    inputs, compare = drawn(case, variant)
    raising = "State.check raises InvalidInput; name the state's class in state_type"
    with torch.no_grad():
        own = feed(variant, inputs, [3])[1]
    for words, make in _misfits(variant, inputs):
        with torch.no_grad():
            state = make()
            if type(state) is type(own) and _layout(state) == _layout(own):
                continue  # nothing in it could tell
            # Of its own class only its author knows the layout: there any error will do, silence will not.
            loud = isinstance(state, type(own)) and not isinstance(own, LIBRARY) and "sequence" not in words
            try:
                step(variant, inputs, 3, 5, state)
            except InvalidInput:
                continue
            except Exception as fault:
                told = f"a state {words} raised {type(fault).__name__} ({short(fault, 120)})"
                compare.demand(loud, told, f"Validate it before any tensor work: {raising}")
                continue
        compare.fail(f"a state {words} was accepted", f"Validate its sizes, not only its kind: {raising}")


def check_states_of_another_dtype_change_no_result(variant: Any, case: Case) -> None:
    """A state in another dtype is refused with `InvalidInput`, or the answer is as precise as ever."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    exact, limit, name = truth(variant, inputs)
    for dtype in sorted(d for d in variant.capabilities.dtypes if d != case.dtype):
        with torch.no_grad():
            state = variant.init_state(case.batch, device=inputs.key.device, dtype=getattr(torch, dtype))
            try:
                first = step(variant, inputs, 0, 3, state)
                rest = step(variant, inputs, 3, n, first.state)
            except InvalidInput:
                continue
        got = torch.cat([first.out, rest.out], dim=2)
        fault = f"with a state made for {dtype}, out has dtype {got.dtype}"
        advice = "Refuse the state with InvalidInput, or cast back to query's dtype"
        compare.demand(got.dtype == inputs.query.dtype, fault, advice)
        advice = "Refuse the state with InvalidInput: tokens cast to its dtype lose digits"
        compare.close(got, exact, limit, f"{name} (through a state made for {dtype})", advice)


def check_full_states_grow_or_raise(variant: Any, case: Case) -> None:
    """Tokens beyond a capacity raise, leaving the state usable, or make it grow; none is dropped in silence."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    for capacity, sizes in ((4, [3, n - 3]), (4, [4, 1, n - 5]), (n - 1, [n]), (3, [1] * n), (0, [2, n - 2])):
        visible = visible_by_chunks(inputs, sizes)
        state, start = fresh(variant, inputs, capacity), 0
        for size in sizes:
            fits = start + size <= capacity
            try:
                with torch.no_grad():
                    answer = step(variant, inputs, start, start + size, state)
            except AttnlabError:
                if fits:
                    raise
                if start < capacity:  # what still fits goes in
                    with torch.no_grad():
                        step(variant, inputs, start, capacity, state)
                break
            state = answer.state
            if comparable(variant, inputs, visible):
                exact, limit, name = truth(variant, inputs, visible)
                versus = f"{name} ({size} tokens more than {start}, in a state with a capacity of {capacity})"
                advice = "Raise InvalidInput where a state is full, or let it grow; never drop or overwrite a token"
                compare.close(answer.out, exact[:, :, start : start + size], limit, versus, advice)
            start += size


def _succeeds(attempt: Callable[[Any], Any], state: Any) -> bool:
    try:
        attempt(state)
    except Exception:  # what a call raises that cannot work is for the checks of refusals
        return False
    return True


def _layout(state: Any) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Name, shape and dtype of every tensor that a state holds."""
    held = ((f.name, getattr(state, f.name)) for f in fields(state))
    return [(name, x.shape, x.dtype) for name, x in held if isinstance(x, Tensor)]


def _failing(variant: Any, other: Inputs) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Calls with a state of 3 tokens that should fail, in words; those that are served are no concern here."""
    n = other.case.query_length
    have = variant.capabilities

    def interrupt(*_: Any) -> Any:
        raise Interrupted

    def attempt(changed: Inputs, **more: Any) -> Callable[[Any], Any]:
        return lambda state: step(variant, changed, 3, n, state, **more)

    yield "an unknown offset", attempt(other, offset="middle")
    yield "an offset inside the past", attempt(other, offset=-5)
    yield "a wrong batch", attempt(item(other, 0))
    yield "another dtype", attempt(other.rebuilt({x: t.to(torch.int64) for x, t in other.tensors().items()}))
    yield "a negative dropout", attempt(other, dropout_p=-1.0)
    yield "a key_mask of another length", attempt(other, key_mask=torch.ones(1, 1, dtype=torch.bool))
    yield "gates that it does not have", attempt(other, gates={"none": other.value[..., 0]})
    if have.weights:
        yield "need_weights", attempt(other, need_weights=True)
    if have.score_mod:
        yield "a score_mod that raises", attempt(other, score_mod=interrupt)
    if have.mask_mod:
        yield "a mask_mod that raises", attempt(other, mask_mod=interrupt)
    if have.bias:
        yield "a bias of another shape", attempt(other, bias=other.value.new_zeros(1, 1, 2, 2))


def _misfits(variant: Any, inputs: Inputs) -> Iterator[tuple[str, Callable[[], Any]]]:
    """States of 3 tokens (where they can be fed) that do not fit a call of `inputs`, in words."""
    case, have = inputs.case, variant.capabilities

    def fed(**sizes: Any) -> Callable[[], Any]:
        def make() -> Any:
            changed = replace(case, **sizes)
            geometry = changed.geometry
            sibling = variant if geometry == case.geometry else like(variant, **geometry).to(inputs.query.device)
            theirs = draw(changed, sibling)
            if sibling is not variant:
                sibling = sibling.to(theirs.query.dtype)
            return feed(sibling, theirs, [3])[1]

        return make

    yield "of one sequence for a batch of more", fed(batch=1)
    yield "of one more sequence", fed(batch=case.batch + 1)
    if have.gqa and case.num_heads > 1:
        yield "of other key/value heads", fed(num_kv_heads=1)
    if have.value_dim:
        yield "of another value width", fed(value_dim=case.value_dim + 3)
    if have.head_dims is None:
        wide = case.head_dim + 2
        value = case.value_dim if have.value_dim else wide
        yield "of another key width", fed(head_dim=wide, key_dim=wide, value_dim=value)
    yield "that is no state", lambda: (inputs.key, inputs.value)
    yield "of another kind", lambda: _Foreign(length=3)


class _Foreign(State):
    """A state that no variant's init_state makes."""


def _simple(scope: Scope) -> list[Case]:
    requests = causal_requests(scope, full=8, quick=2, seed=36008)
    return [*causal_cases(scope, "", "key_mask_left"), *requests]


def _sizes(scope: Scope) -> Iterable[Case]:
    return causal_cases(scope, *(("",) if scope.quick else ("", "gqa")))


def _dtypes(scope: Scope) -> Iterable[Case]:
    yield from (case("causal", needs=NEEDS, dtype=d) for d in scope.dtypes)


CHECKS = (
    Check(check_used_states_are_refused, "state", _simple, random_too=True),
    Check(check_failed_calls_leave_the_state_usable, "state", _simple),
    Check(check_mismatched_states_are_refused, "state", _sizes, random_too=True),
    Check(check_states_of_another_dtype_change_no_result, "state", _dtypes),
    Check(check_full_states_grow_or_raise, "state", _simple),
)
