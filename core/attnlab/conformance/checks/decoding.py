"""Generated sequences through a state: any split, and what is done to a state between steps. Needs torch.

A sequence is fed in steps of any size; between them its state is copied, saved, reordered, cut, or asked for weights. Every row must be what
the definition gives for the whole, however far the sequence goes past what a state keeps.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import ADVICE, ends_of, fresh, is_defined, step, truth, up_to
from attnlab.conformance.checks.definition import answers_of_draws, exact_of_draws, far_positions_may_end
from attnlab.conformance.compare.comparer import Comparer
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import direction_for, recorded, slopes, trained
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.oracle.space import Row
from attnlab.conformance.running.check import Check, Scope, small
from attnlab.errors import UnsupportedRequest


def _saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


FORKS: dict[str, Callable[[Any], Any]] = {
    "clone()": lambda state: state.clone(),
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": _saved,
    "detach()": lambda state: state.detach(),
}
"""Ways to a second state that goes on like the first."""


def check_chunked_decoding_equals_full_attention(variant: Any, case: Case) -> None:
    """Steps of any size, with copies, new orders, cuts and requests of weights between them, give the rows of the definition."""
    inputs = draw(case, variant)
    chance = random.Random(case.seed)
    sizes = split(case.key_length, chance, variant.requires.length_multiple)
    visible = up_to(inputs.visible(case.rows), _ends(inputs, sizes))
    exact = {"out": truth(variant, inputs, visible, rows=case.rows)[:2]}
    for what in ("weights", "lse"):
        if getattr(variant.capabilities, what) and is_defined(variant, inputs):
            with suppress(KeyError):  # the definition gives none
                exact[what] = exact_of_draws(variant, [inputs], case.rows, what, visible)
    compare = Comparer(variant, inputs)
    with torch.no_grad(), far_positions_may_end(variant, case):
        _drive(compare, sizes, exact, chance)


def split(length: int, chance: random.Random, multiple: int = 1) -> list[int]:
    """Sizes of steps that come to `length`: a prompt, then single tokens, chunks and empty steps in any order.

    multiple: of which each is one.
    """
    if multiple > 1:
        return [multiple * size for size in split(length // multiple, chance)]
    sizes = [min(length, chance.choice((0, 1, 3, 16, 33, 65, length // 2, length, length)))]
    while sum(sizes) < length:
        size = chance.choice((1, 1, 1, 1, 2, 5, 0, 17, 64))
        ones = chance.choice((1, 1, 6)) if size == 1 else 1
        sizes += [min(size, length - sum(sizes))] * min(ones, length - sum(sizes)) if size else [0]
    return sizes


def _ends(inputs: Inputs, sizes: list[int]) -> Tensor:
    ends = torch.tensor(ends_of(sizes), device=inputs.query.device)
    rows = inputs.case.rows
    return ends if rows is None else ends[rows]


def _drive(compare: Comparer, sizes: list[int], exact: dict[str, Any], chance: random.Random) -> None:
    """Feed the sequence, and compare the rows of each step."""
    variant, inputs, case = compare.variant, compare.inputs, compare.case
    rows = case.rows or list(range(case.query_length))
    capacity = chance.choice((None, case.key_length, case.key_length + 5))
    state, start, order = fresh(variant, inputs, capacity), 0, list(range(case.batch))
    done: list[str] = []
    for size in sizes:
        stop = start + size
        state, order, did = _between(compare, state, start, order, chance)
        done += [f"{did} at {start}"] * bool(did)
        names = [what for what in exact if what != "out" and chance.random() < 0.3]
        moved = inputs if order == list(range(case.batch)) else inputs.take(b=order)
        try:
            answer = step(variant, moved, start, stop, state, **{f"need_{what}": True for what in names})
        except UnsupportedRequest:
            if not names:
                raise
            answer = step(variant, moved, start, stop, state)  # weights of steps may be refused
            names = []
        state = answer.state
        mine = [(n, r) for n, r in enumerate(rows) if start <= r < stop]
        for what in ("out", *names):
            right, limit = exact[what]
            places = [n for n, _ in mine]
            expected = right[order][:, :, places] if mine else right[order][:, :, :0]
            expected = expected[..., :stop] if what == "weights" else expected
            got = getattr(answer, what)
            got = got if got is None else got[:, :, [r - start for _, r in mine]]
            told = f"tokens {start} to {stop - 1} of {case.key_length}, fed as {_listed(sizes)}, capacity {capacity}"
            told += f"; {', '.join(done)}" if done else ""
            versus = f"the float64 definition of the whole ({told})"
            compare.close(got, expected, limit, versus, ADVICE, what=what, rows=[r for _, r in mine])
        start = stop


def _between(
    compare: Comparer, state: Any, start: int, order: list[int], chance: random.Random
) -> tuple[Any, list[int], str]:
    """What is done to the state before the next step: mostly nothing. The state, the order of its rows, and the words for it."""
    variant, inputs, case = compare.variant, compare.inputs, compare.case
    act = chance.choice(("", "", "", "fork", "reorder", "crop"))
    if act == "fork":
        word = chance.choice(sorted(FORKS))
        other = FORKS[word](state)
        if word != "detach()" and start < case.key_length:  # the first goes on too, with other tokens
            stop = min(case.key_length, start + chance.choice((1, 3)))
            step(variant, inputs.take(b=order).changed(torch.neg, "key", "value"), start, stop, state)
        return other, order, word
    if act == "reorder" and case.batch > 1:
        index = [chance.randrange(case.batch) for _ in order]
        moved = state.reorder(torch.tensor(index, device=inputs.key.device))
        return moved, [order[i] for i in index], f"reorder({index})"
    if act == "crop" and start < case.key_length:
        more = min(case.key_length - start, chance.choice((1, 2, 5)))
        longer = step(variant, inputs.take(b=order), start, start + more, state.clone()).state
        try:
            return longer.crop(start), order, f"{more} tokens and crop({start})"
        except UnsupportedRequest:
            return state, order, ""
    return state, order, ""


def check_state_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients through steps of any size equal the definition's of the whole."""
    inputs, rows = draw(case, variant), case.rows
    require_exact(variant, inputs)
    chance = random.Random(case.seed)
    sizes, capacity = (
        split(case.key_length, chance, variant.requires.length_multiple),
        chance.choice((None, case.key_length)),
    )
    direction = direction_for(inputs, rows)
    visible = up_to(inputs.visible(rows), _ends(inputs, sizes))
    (exact, limit), exact_gradients = answers_of_draws(variant, [inputs], direction, rows, visible)
    leaves = recorded(inputs.tensors())
    call = inputs.rebuilt(leaves)
    with torch.enable_grad(), far_positions_may_end(variant, case):
        state, start, outs = fresh(variant, inputs, capacity), 0, []
        for size in sizes:
            answer = step(variant, call, start, start + size, state)
            state, start = answer.state, start + size
            outs.append(answer.out)
        out = torch.cat(outs, dim=2)
        grads = slopes(out, {**leaves, **trained(variant)}, direction)
    compare = Comparer(variant, inputs)
    versus = f"the float64 definition of the whole (while gradients are recorded, fed as {_listed(sizes)})"
    got = out.detach()
    compare.close(got if rows is None else got[:, :, rows], exact, limit, versus, ADVICE, rows=rows)
    advice = "While autograd records, append by concatenation: nothing detached, nothing written over"
    versus = f"the gradient of the whole (fed as {_listed(sizes)}, capacity {capacity})"
    compare.close_gradients(grads, exact_gradients, advice, versus)


def _listed(sizes: list[int]) -> str:
    return "+".join(map(str, sizes[:12])) + ("+..." if len(sizes) > 12 else "")


SHORTEST = 7
"""Tokens of a sequence whose state is copied, cut and continued."""
LONGEST = 140
"""Tokens of a sequence: three times the bound of any state that an option of a variant under test sets."""


def _square(row: Row) -> Row | None:
    """The row with as many queries as keys."""
    length = min(max(2, *row["lengths"]), LONGEST)
    return {**row, "lengths": (length, length)}


def _causal(row: Row) -> Row | None:
    return _square({**row, "causal": "causal"})


def _short(row: Row) -> Row | None:
    length = min(max(SHORTEST, *row["lengths"]), 4 * SHORTEST)
    return small({**row, "causal": "causal", "lengths": (length, length)})


def causal_requests(scope: Scope, *needs: str, full: int, quick: int, seed: int) -> list[Case]:
    """Causal requests of as many queries as keys, for checks of what is done to a state."""
    without = ("offset", "contents", "layout")
    return scope.requests("state", "causal", *needs, without=without, change=_short, full=full, quick=quick, seed=seed)


def _sequences(scope: Scope) -> Iterable[Case]:
    yield from scope.requests(
        "state", "causal", without=("offset", "contents", "layout"), change=_causal, full=100, quick=16
    )
    if not scope.quick:
        long: dict[str, Any] = {"needs": ("state",), "batch": 1, "query_length": LONGEST, "key_length": LONGEST}
        yield from (replace(one, seed=n) for n in range(6) for one in scope.cases("causal", **long))
        yield from scope.requests("state", without=("causal", "offset", "contents"), change=_square, full=40, seed=2000)


def _recorded(scope: Scope) -> Iterable[Case]:
    without = ("offset", "contents", "layout")
    return scope.requests("state", "causal", "backward", without=without, change=_causal, full=60, quick=8, seed=3000)


CHECKS = (
    Check(check_chunked_decoding_equals_full_attention, "state", _sequences, asks_more=True),
    Check(check_state_gradients_match_definition, "state", _recorded),
)
