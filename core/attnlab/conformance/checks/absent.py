"""Absent slots may hold anything at all. Needs torch.

Absent are keys out of `key_mask`, `key_lengths` or segments, and queries past `query_lengths`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.extremes import long_inputs
from attnlab.conformance.compare.messages import demand_close, demand_zero
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle import visibility
from attnlab.conformance.oracle.cases import Case, case, each
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs, reduction_terms
from attnlab.conformance.running.check import Check, Scope

CONTENTS = (float("nan"), float("inf"), 1e30)
ADVICE = (
    "Absent slots may hold anything: clean them (the gate does) and zero them again after a feature map, "
    "in the normaliser and in the state as well"
)


def check_absent_slots_reach_no_output(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in absent slots change neither out nor, where declared, weights and lse."""
    inputs = long_inputs(variant, case)
    asked = {"need_weights": bool(variant.capabilities.weights), "need_lse": bool(variant.capabilities.lse)}
    with torch.no_grad():
        clean = filled(inputs, 0.0).run(variant, **asked)
        for content in CONTENTS:
            dirty = filled(inputs, content).run(variant, **asked)
            for what in ("out", "weights", "lse"):
                expected = getattr(clean, what)
                if expected is not None:
                    size = max(largest(inputs.value), largest(expected))
                    demand_close(
                        getattr(dirty, what),
                        expected,
                        rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
                        variant,
                        case,
                        what=what,
                        versus=f"the same call with 0 instead of {content} in the absent slots",
                        advice=ADVICE,
                    )


def check_absent_slots_reach_no_gradient(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in absent slots change no gradient, and their own gradient is exactly 0."""
    inputs = long_inputs(variant, case)
    direction = direction_for(inputs)
    _, clean = gradients(variant, filled(inputs, 0.0), direction)
    absent_query, absent_key = absent_slots(inputs)
    for content in CONTENTS:
        _, dirty = gradients(variant, filled(inputs, content), direction)
        for name, expected in clean.items():
            size = max(largest(expected), largest(direction) * largest(inputs.value))
            demand_close(
                dirty[name],
                expected,
                rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
                variant,
                case,
                what=f"gradient of {name}",
                versus=f"the same call with 0 instead of {content} in the absent slots",
                advice=ADVICE,
            )
        for name, absent in (("query", absent_query), ("key", absent_key), ("value", absent_key)):
            own = dirty[name].transpose(1, 2)[absent]  # [n, H, D]
            demand_zero(
                own,
                variant,
                case,
                what=f"gradient of an absent {name} slot",
                why=f"it holds {content} and takes no part",
                advice=ADVICE,
            )


def absent_slots(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Absent queries `[B, Lq]` and absent keys `[B, Lk]`, from the scalar predicate."""
    rules = inputs.rules()
    queries = [[not visibility.query_present(b, i, rules) for i in range(rules.queries)] for b in range(rules.batch)]
    keys = [[not visibility.key_present(b, j, rules) for j in range(rules.keys)] for b in range(rules.batch)]
    device = inputs.query.device
    return torch.tensor(queries, device=device), torch.tensor(keys, device=device)


def filled(inputs: Inputs, content: float) -> Inputs:
    """The call with `content` in every absent slot of query, key, value and gates."""
    absent_query, absent_key = absent_slots(inputs)
    limit = torch.finfo(inputs.query.dtype).max
    content = min(content, limit) if content < float("inf") else content
    q, k = absent_query[:, None, :, None], absent_key[:, None, :, None]
    changed: dict[str, Any] = {
        "query": inputs.query.masked_fill(q, content),
        "key": inputs.key.masked_fill(k, content),
        "value": inputs.value.masked_fill(k, content),
    }
    gates = inputs.arguments.get("gates")
    if gates:
        changed["gates"] = {n: g.masked_fill(k if g.dim() == 4 else k[..., 0], content) for n, g in gates.items()}
    return inputs.with_tensors(**changed)


def _cases(scope: Scope) -> Iterable[Case]:
    labels = ("key_mask_left", "key_mask_right", "key_mask_holes", "key_lengths", "query_lengths", "segments")
    yield from each(*labels, dtype=scope.base)
    yield case("causal", "key_mask_left", dtype=scope.base)
    yield case("causal", "key_mask_holes", "gqa", dtype=scope.base)
    yield case("key_mask_left", "longer_keys", dtype=scope.base)
    yield case(*declared(scope, "segments", "gqa"), needs=("segments",), dtype=scope.base)
    length = 70 if scope.stepwise else 140
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": length, "key_length": length}
    for more in (("causal",),) if scope.quick else ((), ("causal",)):
        yield case(*more, needs=("key_mask",), note="late keys", dtype=scope.base, **sizes)
    for dtype in scope.dtypes:
        if dtype != scope.base and not (scope.quick and dtype == "float64"):
            yield case("key_mask_holes", dtype=dtype)
            yield case("causal", "key_mask_left", dtype=dtype)


def _gradient_cases(scope: Scope) -> Iterable[Case]:
    return (replace(c, needs=(*c.needs, "backward")) for c in _cases(scope))


CHECKS = (
    Check(check_absent_slots_reach_no_output, "absent slots", _cases, asks_more=True, random_too=True),
    Check(check_absent_slots_reach_no_gradient, "absent slots", _gradient_cases, random_too=True),
)
