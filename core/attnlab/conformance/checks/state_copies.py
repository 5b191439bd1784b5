"""What is done to a state between calls: copies, new orders, cuts, and whose memory it is. Needs torch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import NEEDS, feed, fresh, same, step
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput, UnsupportedRequest

CUT = 3
"""Tokens that a state holds before something is done to it."""


def check_clones_fork(variant: Any, case: Case) -> None:
    """clone(), deepcopy, pickle and torch.save give a state that continues alone and leaves its origin as it was."""
    inputs = draw(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    with torch.no_grad():
        moved = feed(variant, inputs, [CUT], n)[1].to("meta")
    for name, x in ((f.name, getattr(moved, f.name)) for f in fields(moved)):
        demand(
            not isinstance(x, Tensor) or x.device.type == "meta",
            variant,
            case,
            f"state.to() left {name} where it was",
            "Every tensor of a state moves with it",
        )
    for word, fork in _forks(case.device).items():
        for capacity, keepers in ((n, ("origin", "copy")), (None, ("origin", "copy")[: word == "clone()"])):
            for keeper in keepers:
                with torch.no_grad():
                    _, state = feed(variant, inputs, [CUT], capacity)
                    copied = fork(state)
                    if word in MOVES and state.spent:
                        if keeper == "origin":
                            continue  # it moved: there is one state, not two
                        state = None
                    kept, other = (state, copied) if keeper == "origin" else (copied, state)
                    first = step(variant, inputs, CUT, CUT + 1, kept)
                    if other is not None:  # takes other tokens in between
                        step(variant, _others(variant, inputs), CUT, n, other)
                    rest = step(variant, inputs, CUT + 1, n, first.state)
                same(
                    variant,
                    inputs,
                    torch.cat([first.out, rest.out], dim=2),
                    expected,
                    f"the run without a fork ({word}, capacity {capacity}, continuing the {keeper})",
                    "A copy holds memory of its own and everything that the next step needs",
                )


def check_copies_carry_gradients(variant: Any, case: Case) -> None:
    """While autograd records, gradients of later steps reach the tokens before a clone(), reorder() or crop()."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)
    rows = torch.arange(case.batch, device=case.device)
    ways: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda s: s,
        "clone()": lambda s: s.clone(),
        "reorder()": lambda s: s.reorder(rows),
        "crop()": lambda s: s.crop(s.length),
    }
    found: dict[str, dict[str, Tensor]] = {}
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
            grads = torch.autograd.grad(
                torch.cat([first, rest], dim=2),
                list(leaves.values()),
                direction,
                allow_unused=True,
                materialize_grads=True,
            )
        found[word] = dict(zip(leaves, grads, strict=True))
    for word, grads_by_name in found.items():
        for name, expected in found["nothing"].items():
            size = max(largest(expected), largest(direction) * largest(inputs.value))
            demand_close(
                grads_by_name[name],
                expected,
                rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
                variant,
                case,
                what=f"gradient of {name}",
                versus=f"the run without {word}",
                advice="A copy stays in the graph: cutting it is what detach() is for",
            )


def check_states_reorder(variant: Any, case: Case) -> None:
    """reorder(index) continues row b from row index[b], as a beam search needs: repeated rows, fewer and more."""
    inputs = draw(case, variant)
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
            first = step(variant, _by_rows(inputs, rows), CUT, CUT + 1, state.reorder(index))
            if not state.spent:  # it stayed usable, and then must be as it was
                own = step(variant, inputs, CUT, n, state).out
                same(variant, inputs, own, expected, f"the run without a reorder({rows}) of its state")
            rest = step(variant, _by_rows(inputs, rows), CUT + 1, n, first.state)
        same(
            variant,
            inputs,
            torch.cat([first.out, rest.out], dim=2),
            expected[rows],
            f"the rows {rows} of the run without reorder (capacity {capacity})",
            "Row b continues from row index[b]: keys, values, sums, masks and segments alike, "
            "index_select(0, index) and not its inverse",
        )


def check_cropped_states_forget(variant: Any, case: Case) -> None:
    """crop(n) gives the state after the first n tokens; a length that it never had is `InvalidInput`."""
    inputs = draw(case, variant)
    others = _others(variant, inputs)
    n = case.query_length
    expected = _uncut(variant, inputs)
    for kept, capacity in ((CUT, None), (CUT, n), (0, None), (CUT + 2, n)):
        with torch.no_grad():
            _, state = feed(variant, inputs, [min(kept, CUT)], capacity)
            if kept < CUT + 2:  # tokens that are to be forgotten
                state = step(variant, others, kept, CUT + 2, state).state
            else:
                state = step(variant, inputs, CUT, kept, state).state
            whole = step(variant, inputs, CUT + 2, n, state.clone()).out
            try:
                cropped = state.crop(kept)
            except UnsupportedRequest as refusal:
                raise NotApplicable(f"it offers no crop: {refusal}") from None
            demand(
                cropped.length == kept,
                variant,
                case,
                f"state.crop({kept}) has length {cropped.length}",
                "length counts the tokens that are left",
            )
            answer = step(variant, inputs, kept, n, cropped)
            if not state.spent:  # it stayed usable, and then must hold what it held
                rest = step(variant, inputs, CUT + 2, n, state).out
                same(variant, inputs, rest, whole, f"the run without a crop({kept}) of its state")
        same(
            variant,
            inputs,
            answer.out[:, :, max(CUT - kept, 0) :],
            expected[:, :, max(kept - CUT, 0) :],
            f"the run that was fed {kept} tokens before (capacity {capacity})",
            "Keys, values, masks and segments all end at the new length",
        )
    for length in (-1, CUT + 1):
        with torch.no_grad():
            _, state = feed(variant, inputs, [CUT], n)
            try:
                state.crop(length)
            except InvalidInput:
                after = step(variant, inputs, CUT, n, state).out
                same(variant, inputs, after, expected, f"the run without a refused crop({length})")
                continue
        demand(
            False,
            variant,
            case,
            f"state.crop({length}) of {CUT} tokens was accepted",
            f"Raise InvalidInput for a length out of 0..{CUT}: negative ones count from no end",
        )


def check_copies_of_cropped_states_continue(variant: Any, case: Case) -> None:
    """What is copied, saved, moved or reordered after a crop continues from the length that is left."""
    inputs = draw(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    rows = torch.arange(case.batch, device=case.device)
    forks: dict[str, Callable[[Any], Any]] = {"reorder()": lambda s: s.reorder(rows), **_forks(case.device)}
    for word, fork in forks.items():
        for capacity in (None, n):
            with torch.no_grad():
                _, state = feed(variant, inputs, [CUT], capacity)
                state = step(variant, _others(variant, inputs), CUT, CUT + 2, state).state
                try:
                    copied = fork(state.crop(CUT))
                except UnsupportedRequest as refusal:
                    raise NotApplicable(f"it offers no crop: {refusal}") from None
                demand(
                    copied.length == CUT,
                    variant,
                    case,
                    f"{word} of a state that was cropped to {CUT} tokens has length {copied.length}",
                    "A store may hold more than counts: length says what is left",
                )
                rest = step(variant, inputs, CUT, n, copied).out
            versus = f"the run that was fed {CUT} tokens (crop({CUT}), then {word}; capacity {capacity})"
            same(variant, inputs, rest, expected, versus, "A copy carries what is left, and its length")


def check_states_own_their_memory(variant: Any, case: Case) -> None:
    """Overwriting what a step was given or gave, and feeding another sequence in between, changes no later step."""
    inputs = draw(case, variant)
    n = case.query_length
    expected = _uncut(variant, inputs)
    for recording in (False, True):
        if recording and not variant.capabilities.backward:
            continue
        scratch = _copied(inputs)
        query = scratch.query.clone().requires_grad_(recording)
        with torch.set_grad_enabled(recording):
            answer = step(variant, scratch.with_tensors(query=query), 0, CUT, fresh(variant, inputs))
        with torch.no_grad():
            feed(variant, _others(variant, inputs), [CUT, 1], n)  # another sequence, in a state of its own
            answer.out.detach().fill_(7.0)
            scratch.key[:, :, :CUT], scratch.value[:, :, :CUT] = 5.0, -5.0
            for gate in (scratch.arguments.get("gates") or {}).values():
                gate.fill_(0.5)
            for name in ("key_mask", "segments"):
                for x in _parts(scratch.arguments.get(name)):
                    x.copy_(x.flip(1) if name == "segments" else ~x)
            got = step(variant, inputs, CUT, n, answer.state).out
        same(
            variant,
            inputs,
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
    """The call with other numbers, and other tokens absent."""
    other = draw(replace(inputs.case, seed=inputs.case.seed + 17), variant)
    more: dict[str, Any] = {}
    if "key_mask" in inputs.arguments:
        more["key_mask"] = ~inputs.arguments["key_mask"]
    if "segments" in inputs.arguments:
        more["segments"] = tuple(ids.flip(1) for ids in inputs.arguments["segments"])
    return inputs.rebuilt(other.tensors()).with_tensors(**more)


def _by_rows(inputs: Inputs, rows: list[int]) -> Inputs:
    """The call whose row b is row `rows[b]`."""
    named = {
        n: x[rows] if n in ("query", "key", "value") or n.startswith("gates.") else x
        for n, x in inputs.tensors().items()
    }
    more: dict[str, Any] = {}
    if "key_mask" in inputs.arguments:
        more["key_mask"] = inputs.arguments["key_mask"][rows]
    if "segments" in inputs.arguments:
        more["segments"] = tuple(ids[rows] for ids in inputs.arguments["segments"])
    return inputs.rebuilt(named).with_tensors(**more)


def _copied(inputs: Inputs) -> Inputs:
    more: dict[str, Any] = {}
    for name in ("key_mask", "segments"):
        given = inputs.arguments.get(name)
        if given is not None:
            copies = tuple(x.clone() for x in _parts(given))
            more[name] = copies if isinstance(given, tuple) else copies[0]
    return inputs.rebuilt({n: x.clone() for n, x in inputs.tensors().items()}).with_tensors(**more)


def _parts(given: Any) -> tuple[Tensor, ...]:
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)


def _simple(scope: Scope) -> Iterable[Case]:
    labels = ("", "key_mask_left") if scope.quick else ("", "key_mask_left", "segments", "gqa")
    for label in labels:
        yield case("causal", *([label] if label else []), needs=NEEDS, dtype=scope.base)


def _one(scope: Scope) -> Iterable[Case]:
    return list(_simple(scope))[:1]


def _three_rows(scope: Scope) -> Iterable[Case]:
    return (replace(c, batch=3) for c in _simple(scope))


def _recorded(scope: Scope) -> Iterable[Case]:
    return (replace(c, needs=(*c.needs, "backward")) for c in list(_simple(scope))[:2])


CHECKS = (
    Check(check_clones_fork, "state", _simple),
    Check(check_copies_carry_gradients, "state", _recorded),
    Check(check_states_reorder, "state", _three_rows),
    Check(check_cropped_states_forget, "state", _simple),
    Check(check_copies_of_cropped_states_continue, "state", _one),
    Check(check_states_own_their_memory, "state", _simple),
)
