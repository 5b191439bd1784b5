"""Decoding with a state: full equals any chunking equals one by one. Needs torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.cases import Case, case
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.derivatives import defined_gradients, direction_for, recorded
from attnlab.conformance.inputs import Inputs, draw, exact_and_bound, plain_dtype, reduction_terms
from attnlab.conformance.messages import demand, demand_close
from attnlab.conformance.tolerances import bound, largest
from attnlab.errors import AttnlabError

ADVICE = (
    "With a state positions continue from its length: the mask of a step is the full mask's last rows, "
    "and the state must hold every token that came before, once"
)


def check_chunks_equal_the_whole(variant: Any, case: Case) -> None:
    """Fed one by one, in two parts or at once through a state, the outputs equal the definition's of the whole."""
    inputs = draw(case, variant)
    exact, limit = exact_and_bound(variant, inputs)
    n = case.query_length
    with torch.no_grad():
        for word, sizes in (
            ("one by one", [1] * n),
            ("in two chunks", [n // 2 - 1, n - n // 2 + 1]),
            ("at once", [n]),
        ):
            for capacity in (None, n, n + 5):
                got = chunked(variant, inputs, sizes, capacity)
                demand_close(
                    got,
                    exact,
                    limit,
                    variant,
                    case,
                    what="out",
                    versus=f"the float64 definition of the whole (fed {word}, capacity {capacity})",
                    advice=ADVICE,
                )


def check_state_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients through a chunked run equal the definition's gradients of the whole."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)
    visible = inputs.visible()
    low = plain_dtype(case.dtype)
    exact = defined_gradients(variant, inputs, direction, visible=visible)
    plain = defined_gradients(variant, inputs, direction, getattr(torch, low), visible=visible)
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        out = chunked(variant, inputs.rebuilt(leaves), [2, 1, case.query_length - 3], None)
        found = torch.autograd.grad(
            out, list(leaves.values()), direction, allow_unused=True, materialize_grads=True
        )
    for name, got in zip(leaves, found, strict=True):
        limit = bound(
            case.dtype,
            exact=exact[name],
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case),
            magnitude=largest(direction) * largest(inputs.value),
        )
        demand_close(
            got,
            exact[name],
            limit,
            variant,
            case,
            what=f"gradient of {name}",
            versus="the definition's gradient of the whole",
            advice="While autograd records, append by concatenation",
        )


def check_a_consumed_state_raises(variant: Any, case: Case) -> None:
    """A state that was handed to a call cannot be used again."""
    inputs = draw(case, variant)
    state = _fresh(variant, inputs, None)
    with torch.no_grad():
        step(variant, inputs, 0, 2, state)
        try:
            step(variant, inputs, 2, 3, state)
        except AttnlabError:
            return
    demand(
        False,
        variant,
        case,
        "a state was accepted twice",
        "Mark it spent and raise InvalidInput on the second use",
    )


def check_clones_fork(variant: Any, case: Case) -> None:
    """clone(), deepcopy and pickle give a state that continues alone and leaves its origin as it was."""
    inputs = draw(case, variant)
    other = draw(replace(case, seed=case.seed + 17), variant)
    n = case.query_length
    with torch.no_grad():
        expected = chunked(variant, inputs, [3, n - 3], None)[:, :, 3:]
        forks: dict[str, Callable[[Any], Any]] = {
            "clone()": lambda s: s.clone(),
            "copy.deepcopy": copy.deepcopy,
            "pickle": lambda s: pickle.loads(pickle.dumps(s)),
        }
        for word, fork in forks.items():
            for capacity in (None, n):
                for keeper in ("origin", "copy"):
                    _, state = step(variant, inputs, 0, 3, _fresh(variant, inputs, capacity))
                    copied = fork(state)
                    kept, other_one = (state, copied) if keeper == "origin" else (copied, state)
                    first, kept = step(variant, inputs, 3, 4, kept)
                    step(variant, other, 3, n, other_one)  # takes other tokens in between
                    rest, _ = step(variant, inputs, 4, n, kept)
                    _same(
                        variant,
                        case,
                        inputs,
                        torch.cat([first, rest], dim=2),
                        expected,
                        f"the run without a fork ({word}, capacity {capacity}, continuing the {keeper})",
                    )


def check_states_reorder(variant: Any, case: Case) -> None:
    """reorder(index) continues row b from row index[b], as a beam search needs."""
    inputs = draw(case, variant)
    n = case.query_length
    index = torch.arange(case.batch - 1, -1, -1, device=case.device)
    flipped = inputs.rebuilt(
        {
            x: t[index] if x in ("query", "key", "value") or x.startswith("gates.") else t
            for x, t in inputs.tensors().items()
        }
    )
    if "key_mask" in inputs.arguments:
        flipped = flipped.with_tensors(key_mask=inputs.arguments["key_mask"][index])
    with torch.no_grad():
        expected = chunked(variant, inputs, [3, n - 3], None)[:, :, 3:][index]
        _, state = step(variant, inputs, 0, 3, _fresh(variant, inputs, None))
        got, _ = step(variant, flipped, 3, n, state.reorder(index))
    _same(variant, case, inputs, got, expected, "the rows in the new order")


def check_states_own_their_memory(variant: Any, case: Case) -> None:
    """Overwriting a step's key and value afterwards changes no later step."""
    inputs = draw(case, variant)
    n = case.query_length
    with torch.no_grad():
        expected = chunked(variant, inputs, [3, n - 3], None)[:, :, 3:]
    for recording in (False, True):
        if recording and not variant.capabilities.backward:
            continue
        tensors = {x: t.clone() for x, t in inputs.tensors().items()}
        scratch = inputs.rebuilt(tensors)
        query = scratch.query.clone().requires_grad_(recording)
        with torch.set_grad_enabled(recording):
            _, state = step(variant, scratch.with_tensors(query=query), 0, 3, _fresh(variant, inputs, None))
        with torch.no_grad():
            scratch.key[:, :, :3], scratch.value[:, :, :3] = 5.0, -5.0
            got, _ = step(variant, inputs, 3, n, state)
        _same(variant, case, inputs, got, expected, "the run whose inputs were left alone")


def check_absent_slots_reach_no_state(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in the absent slots of one step change no later step."""
    from attnlab.conformance.checks.absent import CONTENTS, filled

    inputs = draw(case, variant)
    n = case.query_length
    with torch.no_grad():
        expected = chunked(variant, filled(inputs, 0.0), [3, n - 3], None)
        for content in CONTENTS:
            got = chunked(variant, filled(inputs, content), [3, n - 3], None)
            _same(
                variant, case, inputs, got, expected, f"the run with 0 instead of {content} in absent slots"
            )


def chunked(variant: Any, inputs: Inputs, sizes: Sequence[int], capacity: int | None) -> Tensor:
    """The outputs of the whole, fed in chunks of these sizes through one state."""
    state = _fresh(variant, inputs, capacity)
    parts, start = [], 0
    for size in sizes:
        out, state = step(variant, inputs, start, start + size, state)
        parts.append(out)
        start += size
    return torch.cat(parts, dim=2)


def step(variant: Any, inputs: Inputs, start: int, stop: int, state: Any) -> tuple[Tensor, Any]:
    """Tokens [start, stop) through `state`: out and the next state."""

    def cut(name: str, x: Any) -> Any:
        if name == "key_mask":
            return x[:, start:stop]
        if name == "segments":
            return tuple(ids[:, start:stop] for ids in x)
        if name == "gates":
            return {n: gate[:, :, start:stop] for n, gate in x.items()}
        if name in ("mask", "bias"):
            rows = x[..., start:stop, :] if x.shape[-2] > 1 else x
            return rows[..., :stop] if x.shape[-1] > 1 else rows
        return x

    arguments = {n: cut(n, x) for n, x in inputs.arguments.items()}
    answer = variant(
        inputs.query[:, :, start:stop],
        inputs.key[:, :, start:stop],
        inputs.value[:, :, start:stop],
        state=state,
        **arguments,
    )
    demand(
        answer.state is not None,
        variant,
        inputs.case,
        "a state was given and none came back",
        "Return the next state in AttentionOutput",
    )
    return answer.out, answer.state


def _fresh(variant: Any, inputs: Inputs, capacity: int | None) -> Any:
    return variant.init_state(
        inputs.query.shape[0], capacity=capacity, device=inputs.key.device, dtype=inputs.key.dtype
    )


def _same(variant: Any, case: Case, inputs: Inputs, got: Tensor, expected: Tensor, versus: str) -> None:
    from attnlab.conformance.tolerances import rounding_bound

    size = max(largest(expected), largest(inputs.value))
    limit = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size)
    demand_close(got, expected, limit, variant, case, what="out", versus=versus, advice=ADVICE)


NEEDS = ("state", "causal")


def _whole(scope: Scope) -> Iterable[Case]:
    labels = (
        "",
        "key_mask_left",
        "key_mask_holes",
        "gqa",
        "value_dim",
        "query_dim",
        "softcap",
        "score_mod",
        "sinks",
        "bias",
        "mask",
        "segments",
        "left_window",
        "mask_mod",
        "scale",
    )
    for label in labels:
        yield case("causal", *([label] if label else []), needs=NEEDS, dtype=scope.base)
    yield from (case("causal", needs=NEEDS, dtype=d) for d in scope.dtypes if d != scope.base)


def _gradient(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("gqa",), ("key_mask_left",)):
        yield case("causal", *labels, needs=(*NEEDS, "backward"), dtype=scope.base)


def _simple(scope: Scope) -> Iterable[Case]:
    yield case("causal", needs=NEEDS, dtype=scope.base)
    yield case("causal", "key_mask_left", needs=NEEDS, dtype=scope.base)


def _padded(scope: Scope) -> Iterable[Case]:
    for label in ("key_mask_left", "key_mask_holes"):
        yield from (case("causal", label, needs=NEEDS, dtype=d) for d in scope.dtypes)


CHECKS = (
    Check(check_chunks_equal_the_whole, "state", _whole),
    Check(check_state_gradients_match_definition, "state", _gradient),
    Check(check_a_consumed_state_raises, "state", _simple),
    Check(check_clones_fork, "state", _simple),
    Check(check_states_reorder, "state", _simple),
    Check(check_states_own_their_memory, "state", _simple),
    Check(check_absent_slots_reach_no_state, "state", _padded),
)
