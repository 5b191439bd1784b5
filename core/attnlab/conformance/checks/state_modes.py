"""What a state must not depend on, capacity and mode, and what it always keeps. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import NEEDS, feed, fresh, same, step
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import recorded
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.state import CacheState


def check_capacity_changes_nothing(variant: Any, case: Case) -> None:
    """Outputs do not depend on the capacity, nor on what lies in a store's unused slots."""
    inputs = draw(case, variant)
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
            filled = "" if content is None else ", NaN in its unused slots"
            same(
                variant,
                inputs,
                torch.cat(parts, dim=2),
                expected,
                f"the run with a capacity of {n} (this: {capacity}{filled})",
                "Unused slots are no keys: cut them off, a weight of 0 times NaN is NaN",
            )


def check_states_keep_length_and_dtype(variant: Any, case: Case) -> None:
    """length counts tokens, absent ones too; a cache keeps key's dtype, sums are float32 or better; one class throughout."""
    inputs = draw(case, variant)
    n = case.query_length
    state, start = fresh(variant, inputs, n), 0
    kind, summed = type(state), variant.family in ("feature_map", "recurrent")
    for size in (0, 2, 1, 0, n - 3):
        for recording in (False, variant.capabilities.backward):
            given = inputs.with_tensors(query=inputs.query.clone().requires_grad_(recording))
            with torch.set_grad_enabled(recording):
                following = step(variant, given, start, start + size, state.clone()).state
            _judge(variant, case, following, kind, start + size, summed, inputs.key.dtype)
        state, start = following.detach(), start + size


def check_modes_agree_while_decoding(variant: Any, case: Case) -> None:
    """no_grad, inference mode, recording and training mode decode to one answer (no dropout is asked for)."""
    inputs = draw(case, variant)
    n = case.query_length
    sizes = [3, 1, n - 4]
    was = variant.training

    def inferred(capacity: int | None) -> Tensor:
        with torch.inference_mode():
            return feed(variant, inputs, sizes, capacity)[0].clone()

    def enabled(capacity: int | None) -> Tensor:
        with torch.enable_grad():
            return feed(variant, inputs, sizes, capacity)[0].detach()

    def recording(capacity: int | None) -> Tensor:
        with torch.enable_grad():
            return feed(variant, inputs.rebuilt(recorded(inputs.tensors())), sizes, capacity)[0].detach()

    def inferred_prompt(capacity: int | None) -> Tensor:
        with torch.inference_mode():
            first, state = feed(variant, inputs, sizes[:1], capacity)
        parts, start = [first.clone()], sizes[0]
        for size in sizes[1:]:
            with torch.no_grad():
                answer = step(variant, inputs, start, start + size, state)
            state, start = answer.state, start + size
            parts.append(answer.out)
        return torch.cat(parts, dim=2)

    modes = {
        "inference mode": inferred,
        "a prompt in inference mode and steps outside": inferred_prompt,
        "with gradients enabled": enabled,
    }
    if variant.capabilities.backward:
        modes["recorded by autograd"] = recording
    with torch.no_grad():
        expected, _ = feed(variant, inputs, sizes)
    try:
        for training, capacity in ((False, n), (True, None)):
            variant.train(training)
            for word, mode in modes.items():
                same(
                    variant,
                    inputs,
                    mode(capacity),
                    expected,
                    f"no_grad in eval mode (this: {word}, {'train' if training else 'eval'}, capacity {capacity})",
                    "Whether autograd records decides how a state is kept, not what it holds",
                )
    finally:
        variant.train(was)


def _judge(variant: Any, case: Case, state: Any, kind: type, length: int, summed: bool, dtype: torch.dtype) -> None:
    demand(
        type(state) is kind,
        variant,
        case,
        f"init_state gives a {kind.__name__} and a step a {type(state).__name__}",
        "One class in every mode",
    )
    demand(
        state.length == length,
        variant,
        case,
        f"after {length} tokens the state's length is {state.length}",
        "length counts every token that was fed, absent ones too: positions continue from it",
    )
    for field in fields(state):
        x = getattr(state, field.name)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        wide = torch.finfo(x.dtype).bits >= (64 if dtype == torch.float64 else 32)
        demand(
            wide or (x.dtype == dtype and not summed),
            variant,
            case,
            f"state.{field.name} is {x.dtype} where keys are {dtype}",
            "Sums are kept in float32 or better" if summed else "A cache keeps key's dtype",
        )


def _simple(scope: Scope) -> Iterable[Case]:
    yield case("causal", needs=NEEDS, dtype=scope.base)
    yield case("causal", "key_mask_left", needs=NEEDS, dtype=scope.base)


def _lengths(scope: Scope) -> Iterable[Case]:
    yield from (case("causal", needs=NEEDS, dtype=d) for d in scope.dtypes)
    for label in ("key_mask_left", "key_mask_holes", "segments", "gqa"):
        yield case("causal", label, needs=NEEDS, dtype=scope.base)


def _stores(scope: Scope) -> Iterable[Case]:
    few = ("", "key_mask_left")
    labels = few if scope.quick else (*few, "gqa", "left_window", "mask", "bias", "segments", "score_mod", "sinks")
    yield from (case("causal", *([x] if x else []), needs=NEEDS, dtype=scope.base) for x in labels)
    if not scope.quick:
        yield case(needs=("state",), dtype=scope.base)
        yield case("key_mask_left", needs=("state",), dtype=scope.base)


CHECKS = (
    Check(check_capacity_changes_nothing, "state", _stores),
    Check(check_states_keep_length_and_dtype, "state", _lengths, random_too=True),
    Check(check_modes_agree_while_decoding, "state", _simple),
)
