"""Queries that see no key: exactly nothing comes out, and nothing goes back. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.extremes import long_inputs
from attnlab.conformance.compare.messages import demand, demand_finite, demand_zero
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs
from attnlab.conformance.running.check import Check, Scope

ADVICE = (
    "Neutralise such rows before normalising (a zero normaliser becomes 1, no maximum becomes 0) rather than "
    "repairing NaN afterwards: 0 * NaN in the backward undoes a repair"
)
LABELS = (
    "mask",
    "mask_per_item",
    "mask_per_head",
    "mask_of_each",
    "negative_offset",
    "hiding_bias",
    "segments",
    "query_lengths",
    "no_keys",
    "no_present_keys",
)


def check_dead_rows_are_zero(variant: Any, case: Case) -> None:
    """A query that sees nothing: out and weights 0, lse -inf."""
    inputs, dead = _with_dead_rows(variant, case)
    asked = {"need_weights": bool(variant.capabilities.weights), "need_lse": bool(variant.capabilities.lse)}
    with torch.no_grad():
        answers = [inputs.run(variant), inputs.run(variant, **asked)] if any(asked.values()) else [inputs.run(variant)]
    why = "the query sees no key"
    for answer in answers:
        demand_finite(
            answer.out, variant, case, what="out", why="rows that see nothing are 0, never NaN", advice=ADVICE
        )
        demand_zero(
            torch.where(dead[..., None], answer.out, 0), variant, case, what="a dead row's out", why=why, advice=ADVICE
        )
        if answer.weights is not None:
            demand_zero(
                torch.where(dead[..., None], answer.weights, 0),
                variant,
                case,
                what="a dead row's weights",
                why=why,
                advice=ADVICE,
            )
        if answer.lse is not None:
            lowest = answer.lse[dead]
            demand(
                bool((lowest == -torch.inf).all()),
                variant,
                case,
                f"lse of a row that sees no key must be -inf, got {float(lowest.flatten()[0])}",
                "The logarithm of an empty sum is -inf",
            )


def check_dead_rows_receive_no_gradient(variant: Any, case: Case) -> None:
    """Gradients are finite everywhere, and exactly 0 for a query that sees nothing."""
    inputs, dead = _with_dead_rows(variant, case)
    _, found = gradients(variant, inputs, direction_for(inputs))
    for name, gradient in found.items():
        demand_finite(gradient, variant, case, what=f"gradient of {name}", why="some queries see no key", advice=ADVICE)
    demand_zero(
        torch.where(dead[..., None], found["query"], 0),
        variant,
        case,
        what="gradient of a dead row's query",
        why="it sees no key",
        advice=ADVICE,
    )


def _with_dead_rows(variant: Any, case: Case) -> tuple[Inputs, Tensor]:
    inputs = long_inputs(variant, case)
    if case.note == "no_keys":
        inputs = inputs.with_tensors(key_lengths=torch.tensor([0, case.key_length], device=case.device)[: case.batch])
    if case.note == "no_present_keys":
        present = torch.ones(case.batch, case.key_length, dtype=torch.bool, device=case.device)
        present[0] = False
        inputs = inputs.with_tensors(key_mask=present)
    seen = inputs.visible()
    bias = inputs.arguments.get("bias")
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    dead = ~seen.any(dim=-1)  # [B, H, Lq]
    assert bool(dead.any()), f"{case.id}: the case was meant to have dead rows"
    return inputs, dead


def _cases(scope: Scope) -> Iterable[Case]:
    dtypes = [scope.base] if scope.quick else [d for d in scope.dtypes if d != "float16"] or [scope.base]
    if "float16" in scope.dtypes:
        dtypes.append("float16")
    for dtype in dtypes:
        for label in LABELS:
            if label in ("no_keys", "no_present_keys"):
                yield case(note=label, needs=("key_mask",), dtype=dtype)
                yield case("causal", note=label, needs=("key_mask",), dtype=dtype)
            else:
                yield case(label, dtype=dtype)
        yield case("bottom_right", "longer_queries", dtype=dtype)
        yield case("window", "negative_offset", dtype=dtype)
        yield case("mask", "sinks", dtype=dtype)
    # Whole tiles that are hidden, before others that are not and after them.
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": 140, "key_length": 140}
    yield case("causal", needs=("key_mask",), note="late keys", dtype=scope.base, **sizes)
    yield case(
        *declared(scope, "window", "negative_offset"),
        note="late keys",
        needs=("window", "causal", "key_mask"),
        dtype=scope.base,
        **sizes,
    )


def _gradient_cases(scope: Scope) -> Iterable[Case]:
    from dataclasses import replace

    return (replace(c, needs=(*c.needs, "backward")) for c in _cases(scope))


CHECKS = (
    Check(check_dead_rows_are_zero, "dead rows", _cases, asks_more=True, random_too=True),
    Check(check_dead_rows_receive_no_gradient, "dead rows", _gradient_cases, random_too=True),
)
