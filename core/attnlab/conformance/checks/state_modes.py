"""What a state must not depend on (capacity and mode), and what it always keeps. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import NEEDS, feed, fresh, step, steps
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.checks.state import causal_cases
from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import recorded
from attnlab.conformance.running.check import Check, Scope
from attnlab.state import CacheState


def check_capacity_changes_nothing(variant: Any, case: Case) -> None:
    """Outputs do not depend on the capacity, nor on the contents of a store's unused slots."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    sizes, nan = [2, 1, n - 3], float("nan")
    with torch.no_grad():
        expected, _ = feed(variant, inputs, sizes, n)
        ways: list[tuple[int | str | None, float | None]] = [(None, nan), (n + 1, None), (n + 30, nan)]
        if (case.dtype, case.device) == ("float32", "cpu"):
            ways.append(("left out, as dtype and device are", None))
        for capacity, content in ways:
            start, parts = 0, []
            state = variant.init_state(case.batch) if isinstance(capacity, str) else fresh(variant, inputs, capacity)
            for size in sizes:
                if content is not None and isinstance(state, CacheState):
                    state.key[:, :, state.length :] = content
                    state.value[:, :, state.length :] = content
                answer = step(variant, inputs, start, start + size, state)
                state, start = answer.state, start + size
                parts.append(answer.out)
            unused = "" if content is None else ", NaN in its unused slots"
            versus = f"the run with a capacity of {n} (this: {capacity}{unused})"
            advice = "Unused slots are no keys: cut them off, a weight of 0 times NaN is NaN"
            compare.same(torch.cat(parts, dim=2), expected, versus, advice)


def check_states_keep_length_and_dtype(variant: Any, case: Case) -> None:
    """length counts tokens, padding too; a cache keeps key's dtype, sums are float32 or better; one class throughout."""
    inputs, compare = drawn(case, variant)
    state, start = fresh(variant, inputs, case.query_length), 0
    kind, summed = type(state), variant.family in ("feature_map", "recurrent")
    for size in (0, 2, 1, 0, case.query_length - 3):
        for recording in (False, variant.capabilities.backward):
            call = inputs.with_tensors(query=inputs.query.clone().requires_grad_(recording))
            with torch.set_grad_enabled(recording):
                following = step(variant, call, start, start + size, state.clone()).state
            _demand_facts(compare, following, kind, start + size, summed)
        state, start = following.detach(), start + size


def check_modes_agree_while_decoding(variant: Any, case: Case) -> None:
    """no_grad, inference mode, recording and training mode decode to one answer (without dropout)."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    sizes = [3, 1, n - 4]
    was = variant.training

    def all_in(mode: AbstractContextManager[Any], capacity: int | None, leaves: bool = False) -> Tensor:
        with mode:
            call = inputs.rebuilt(recorded(inputs.tensors())) if leaves else inputs
            return feed(variant, call, sizes, capacity)[0].detach().clone()

    def prompt_in_inference(capacity: int | None) -> Tensor:
        with torch.inference_mode():
            first, state = feed(variant, inputs, sizes[:1], capacity)
        with torch.no_grad():
            rest = [fed.answer.out for fed in steps(variant, inputs, sizes[1:], state, sizes[0])]
        return torch.cat([first.clone(), *rest], dim=2)

    modes: dict[str, Callable[[int | None], Tensor]] = {
        "inference mode": lambda capacity: all_in(torch.inference_mode(), capacity),
        "a prompt in inference mode and steps outside": prompt_in_inference,
        "with gradients enabled": lambda capacity: all_in(torch.enable_grad(), capacity),
    }
    if variant.capabilities.backward:
        modes["recorded by autograd"] = lambda capacity: all_in(torch.enable_grad(), capacity, leaves=True)
    with torch.no_grad():
        expected, _ = feed(variant, inputs, sizes)
    try:
        for training, capacity in ((False, n), (True, None)):
            variant.train(training)
            for words, mode in modes.items():
                this = f"{words}, {'train' if training else 'eval'}, capacity {capacity}"
                advice = "Whether autograd records decides how a state is kept, not what it holds"
                compare.same(mode(capacity), expected, f"no_grad in eval mode (this: {this})", advice)
    finally:
        variant.train(was)


def _demand_facts(compare: Comparer, state: Any, kind: type, length: int, summed: bool) -> None:
    """Fail unless the state has this class and length, and dtypes that suit a store or (`summed`) sums."""
    dtype = compare.inputs.key.dtype
    fault = f"init_state gives a {kind.__name__} and a step a {type(state).__name__}"
    compare.demand(type(state) is kind, fault, "One class in every mode")
    compare.demand(
        state.length == length,
        f"after {length} tokens the state's length is {state.length}",
        "length counts every token that was fed, padded ones too: positions continue from it",
    )
    for name, x in ((field.name, getattr(state, field.name)) for field in fields(state)):
        if isinstance(x, Tensor) and x.is_floating_point():
            wide = torch.finfo(x.dtype).bits >= (64 if dtype == torch.float64 else 32)
            compare.demand(
                wide or (x.dtype == dtype and not summed),
                f"state.{name} is {x.dtype} where keys are {dtype}",
                "Sums are kept in float32 or better" if summed else "A cache keeps key's dtype",
            )


def _simple(scope: Scope) -> list[Case]:
    requests = causal_requests(scope, full=16, quick=4, seed=37016)
    return [*causal_cases(scope, "", "key_mask_left"), *requests]


def _lengths(scope: Scope) -> Iterable[Case]:
    yield from (case("causal", needs=NEEDS, dtype=d) for d in scope.dtypes)
    yield from causal_cases(scope, "key_mask_left", "key_mask_holes", "segments", "gqa")


def _stores(scope: Scope) -> list[Case]:
    requests = causal_requests(scope, full=20, quick=4, seed=37020)
    return [*causal_cases(scope, "", "key_mask_left"), *requests]


CHECKS = (
    Check(check_capacity_changes_nothing, "state", _stores),
    Check(check_states_keep_length_and_dtype, "state", _lengths, random_too=True),
    Check(check_modes_agree_while_decoding, "state", _simple),
)
