"""What is done to a state between calls: copies, new orders, cuts; and whose memory it is. Needs torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import ADVICE, NEEDS, feed, fresh, step
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.checks.state import causal_cases
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, recorded, slopes
from attnlab.conformance.oracle.inputs import Inputs, draw, map_tensors
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput, UnsupportedRequest

CUT = 3
"""Tokens that a state holds before something is done to it."""


def check_copied_states_are_independent(variant: Any, case: Case) -> None:
    """clone(), deepcopy, pickle and torch.save give a state that continues alone and leaves its origin as it was."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    with torch.no_grad():
        moved = feed(variant, inputs, [CUT], n)[1].to("meta")
    for name, x in ((f.name, getattr(moved, f.name)) for f in fields(moved)):
        there = not isinstance(x, Tensor) or x.device.type == "meta"
        compare.demand(there, f"state.to() left {name} where it was", "Every tensor of a state moves with it")
    ways = [
        (word, fork, capacity, keeper)
        for word, fork in _forks(case.device).items()
        for capacity, keepers in ((n, ("origin", "copy")), (None, ("origin", "copy")[: word == "clone()"]))
        for keeper in keepers
    ]
    for word, fork, capacity, keeper in ways:
        with torch.no_grad():
            _, state = feed(variant, inputs, [CUT], capacity)
            copied = fork(state)
            if word in MOVES and state.spent:
                if keeper == "origin":
                    continue  # it moved: there is one state, not two
                state = None
            mine, other = (state, copied) if keeper == "origin" else (copied, state)
            first = step(variant, inputs, CUT, CUT + 1, mine)
            if other is not None:  # takes other tokens in between
                step(variant, _others(variant, inputs), CUT, n, other)
            rest = step(variant, inputs, CUT + 1, n, first.state)
        versus = f"the run without a fork ({word}, capacity {capacity}, continuing the {keeper})"
        advice = "A copy holds memory of its own and everything that the next step needs"
        compare.same(torch.cat([first.out, rest.out], dim=2), expected, versus, advice)


def check_copied_states_carry_gradients(variant: Any, case: Case) -> None:
    """While autograd records, gradients of later steps reach the tokens before a clone(), reorder() or crop()."""
    inputs, compare = drawn(case, variant)
    direction = direction_for(inputs)
    rows = torch.arange(case.batch, device=case.device)
    ways: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda s: s,
        "clone()": lambda s: s.clone(),
        "reorder()": lambda s: s.reorder(rows),
        "crop()": lambda s: s.crop(s.length),
    }
    grads: dict[str, Gradients] = {}
    for word, way in ways.items():
        leaves = recorded(inputs.tensors())
        part = inputs.rebuilt(leaves)
        with torch.enable_grad():
            first, state = feed(variant, part, [CUT])
            try:
                after = way(state)
            except UnsupportedRequest:
                continue
            rest = step(variant, part, CUT, case.query_length, after).out
            grads[word] = slopes(torch.cat([first, rest], dim=2), leaves, direction)
    for word, got in grads.items():
        advice = "A copy stays in the graph: cutting it is what detach() is for"
        compare.same_gradients(got, grads["nothing"], f"the run without {word}", advice)


def check_states_reorder(variant: Any, case: Case) -> None:
    """reorder(index) continues row b from row index[b], as a beam search needs: repeated rows, fewer and more."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    for rows, dtype, capacity in (
        ([2, 0, 1], torch.int64, n),
        ([1, 1, 0], torch.int64, None),
        ([2], torch.int32, n),
        ([0, 2, 2, 1, 0], torch.int32, None),
    ):
        index = torch.tensor(rows, device=case.device, dtype=dtype)
        with torch.no_grad():
            _, state = feed(variant, inputs, [CUT], capacity)
            first = step(variant, inputs.take(b=rows), CUT, CUT + 1, state.reorder(index))
            if not state.spent:  # it stayed usable, and then must be as it was
                own = step(variant, inputs, CUT, n, state).out
                compare.same(own, expected, f"the run without a reorder({rows}) of its state", ADVICE)
            rest = step(variant, inputs.take(b=rows), CUT + 1, n, first.state)
        compare.same(
            torch.cat([first.out, rest.out], dim=2),
            expected[rows],
            f"the rows {rows} of the run without reorder (capacity {capacity})",
            "Row b continues from row index[b]: keys, values, sums, masks and segments alike, "
            "index_select(0, index) and not its inverse",
        )


def check_cropped_states_equal_shorter_states(variant: Any, case: Case) -> None:
    """crop(n) gives the state after the first n tokens; a length that it never had is `InvalidInput`."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    for length, capacity in ((CUT, None), (CUT, n), (0, None), (CUT + 2, n)):
        with torch.no_grad():
            _, state = feed(variant, inputs, [min(length, CUT)], capacity)
            if length < CUT + 2:  # tokens that are to be forgotten
                state = step(variant, _others(variant, inputs), length, CUT + 2, state).state
            else:
                state = step(variant, inputs, CUT, length, state).state
            whole = step(variant, inputs, CUT + 2, n, state.clone()).out
            try:
                cropped = state.crop(length)
            except UnsupportedRequest as refusal:
                raise NotApplicable(f"it offers no crop: {refusal}") from None
            fault = f"state.crop({length}) has length {cropped.length}"
            compare.demand(cropped.length == length, fault, "length counts the tokens that are left")
            answer = step(variant, inputs, length, n, cropped)
            if not state.spent:  # it stayed usable, and then must hold what it held
                rest = step(variant, inputs, CUT + 2, n, state).out
                compare.same(rest, whole, f"the run without a crop({length}) of its state", ADVICE)
        got, right = answer.out[:, :, max(CUT - length, 0) :], expected[:, :, max(length - CUT, 0) :]
        versus = f"the run that was fed {length} tokens before (capacity {capacity})"
        compare.same(got, right, versus, "Keys, values, masks and segments all end at the new length")
    for length in (-1, CUT + 1):
        with torch.no_grad():
            _, state = feed(variant, inputs, [CUT], n)
            try:
                state.crop(length)
            except InvalidInput:
                after = step(variant, inputs, CUT, n, state).out
                compare.same(after, expected, f"the run without a refused crop({length})", ADVICE)
                continue
        compare.fail(
            f"state.crop({length}) of {CUT} tokens was accepted",
            f"Raise InvalidInput for a length out of 0..{CUT}: negative ones count from no end",
        )


def check_cropped_states_may_be_copied(variant: Any, case: Case) -> None:
    """A state that is copied, saved, moved or reordered after a crop continues from the length that is left."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    rows = torch.arange(case.batch, device=case.device)
    forks: dict[str, Callable[[Any], Any]] = {"reorder()": lambda s: s.reorder(rows), **_forks(case.device)}
    for word, capacity in ((word, capacity) for word in forks for capacity in (None, n)):
        with torch.no_grad():
            _, state = feed(variant, inputs, [CUT], capacity)
            state = step(variant, _others(variant, inputs), CUT, CUT + 2, state).state
            try:
                copied = forks[word](state.crop(CUT))
            except UnsupportedRequest as refusal:
                raise NotApplicable(f"it offers no crop: {refusal}") from None
            compare.demand(
                copied.length == CUT,
                f"{word} of a state that was cropped to {CUT} tokens has length {copied.length}",
                "A store may hold more than counts: length says what is left",
            )
            rest = step(variant, inputs, CUT, n, copied).out
        versus = f"the run that was fed {CUT} tokens (crop({CUT}), then {word}; capacity {capacity})"
        compare.same(rest, expected, versus, "A copy carries what is left, and its length")


def check_states_own_their_memory(variant: Any, case: Case) -> None:
    """Overwriting a step's inputs and output, and feeding another sequence in between, changes no later step."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    for recording in (False, True) if variant.capabilities.backward else (False,):
        scratch = inputs.mapped(torch.clone)
        query = scratch.query.clone().requires_grad_(recording)
        with torch.set_grad_enabled(recording):
            answer = step(variant, scratch.with_tensors(query=query), 0, CUT, fresh(variant, inputs))
        with torch.no_grad():
            feed(variant, _others(variant, inputs), [CUT, 1], n)  # another sequence, in a state of its own
            answer.out.detach().fill_(7.0)
            scratch.key[:, :, :CUT], scratch.value[:, :, :CUT] = 5.0, -5.0
            map_tensors(scratch.arguments.get("gates"), lambda x: x.fill_(0.5))
            map_tensors(scratch.arguments.get("key_mask"), lambda x: x.copy_(~x))
            map_tensors(scratch.arguments.get("segments"), lambda x: x.copy_(x.flip(1)))
            got = step(variant, inputs, CUT, n, answer.state).out
        compare.same(
            got,
            expected,
            "the run whose inputs and first output were left alone, with no other sequence in between",
            "Keep copies: key, value, key_mask and segments are the caller's to overwrite; keep nothing in the module",
        )


MOVES = ("to()", "detach()")
"""Ways to a second state that may leave the first one spent."""


def _forks(device: str) -> dict[str, Callable[[Any], Any]]:
    def saved(state: Any) -> Any:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {
        "clone()": lambda s: s.clone(),
        "copy.deepcopy": copy.deepcopy,
        "pickle": lambda s: pickle.loads(pickle.dumps(s)),
        "torch.save": saved,
        "to()": lambda s: s.to("cpu").to(device),
        "detach()": lambda s: s.detach(),
    }


def _uncut(variant: Any, inputs: Inputs) -> Tensor:
    """Out of the tokens from CUT on, of a run that nothing was done to."""
    n = inputs.case.query_length
    with torch.no_grad():
        return feed(variant, inputs, [CUT, n - CUT])[0][:, :, CUT:]


def _others(variant: Any, inputs: Inputs) -> Inputs:
    """The call with other numbers, and other tokens padded."""
    other = draw(replace(inputs.case, seed=inputs.case.seed + 17), variant)
    return _remasked(inputs.rebuilt(other.tensors()), lambda x: ~x, lambda ids: ids.flip(1))


def _remasked(inputs: Inputs, key_mask: Callable[[Tensor], Tensor], segments: Callable[[Tensor], Tensor]) -> Inputs:
    """The call with these changes of its key_mask and of its segment ids."""
    changes = {"key_mask": key_mask, "segments": segments}
    arguments = inputs.arguments
    return inputs.with_tensors(**{n: map_tensors(arguments[n], f) for n, f in changes.items() if n in arguments})


def _simple(scope: Scope) -> list[Case]:
    requests = causal_requests(scope, full=12, quick=3, seed=38012)
    return [*causal_cases(scope, "", "key_mask_left"), *requests]


def _one(scope: Scope) -> Iterable[Case]:
    return _simple(scope)[:1]


def _three_rows(scope: Scope) -> Iterable[Case]:
    return (replace(c, batch=3) for c in _simple(scope))


def _recorded(scope: Scope) -> Iterable[Case]:
    yield from causal_cases(scope, "", "key_mask_left", needs=(*NEEDS, "backward"))
    yield from causal_requests(scope, "backward", full=10, quick=2, seed=27000)


CHECKS = (
    Check(check_copied_states_are_independent, "state", _simple),
    Check(check_copied_states_carry_gradients, "state", _recorded),
    Check(check_states_reorder, "state", _three_rows),
    Check(check_cropped_states_equal_shorter_states, "state", _simple),
    Check(check_cropped_states_may_be_copied, "state", _one),
    Check(check_states_own_their_memory, "state", _simple),
)
