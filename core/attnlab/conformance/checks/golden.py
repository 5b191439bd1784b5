"""Golden cases: numbers from outside, which variant and definition must both reproduce. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import Comparer, fail, short
from attnlab.conformance.compare.tolerances import Bound, derived, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, draw, has_definition, map_tensors, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.formulas import GoldenCase, golden_cases


def check_golden_cases_are_reproduced(variant: Any, case: Case) -> None:
    """The output on every golden case, and the definition's, is the one that is written down."""
    cases = golden_cases(variant)
    if not cases:
        raise NotApplicable("it has no golden cases")
    require_exact(variant, draw(case, variant))
    refusals = []
    for one in cases:
        try:
            _compare(variant, case, one)
        except UnsupportedRequest as refusal:
            refusals.append(str(refusal))
    if len(refusals) == len(cases):
        raise NotApplicable(f"it refuses every golden case: {refusals[0]}")


def _compare(variant: Any, case: Case, one: GoldenCase) -> None:
    dtype = getattr(torch, case.dtype)
    query, key, value, expected = (one.tensor(n, dtype).to(case.device) for n in ("query", "key", "value", "out"))
    at = replace(
        case,
        batch=query.shape[0],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        query_length=query.shape[2],
        key_length=key.shape[2],
        head_dim=query.shape[3],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        note=f"golden case: {one.source}",
    )
    made = _made_for(variant, at, one, dtype)
    inputs = Inputs(at, query, key, value, map_tensors(one.call(dtype), lambda x: x.to(case.device)))
    rounding = derived(case.dtype, reduction_terms(at), max(largest(expected), largest(value)))
    origin = f"{one.decimals} decimals are written down, + {rounding:.2e}, rounding"
    limit = Bound(rounding + 0.5 * 10.0**-one.decimals, origin)

    def demand_equal(answer: Tensor, what: str, advice: str) -> None:
        Comparer(made, inputs).close(answer, expected, limit, "the golden case", advice, what=what)

    advice = "The formula itself is wrong: compare with the paper term by term, signs and order included"
    demand_equal(inputs.out(made), "out", advice)
    if has_definition(made):
        advice = "The variant agrees with the golden case, its definition does not"
        demand_equal(define(made, inputs)["out"], "the definition's out", advice)


def _made_for(variant: Any, at: Case, one: GoldenCase, dtype: torch.dtype) -> Any:
    # An option that is off may be one that this variant does not have.
    decided = {n: x for n, x in one.options.items() if x or n in variant.options}
    made = type(variant)(**at.geometry, **{**variant.options, **decided, **one.extra_options})
    made.name = variant.name
    state = one.state_dict(dtype)
    try:
        made = made.to(at.device, dtype).eval()
        made.load_state_dict(state)
    except RuntimeError as fault:
        advice = "GoldenCase.parameters is the whole state_dict, and extra_options are what its shapes need"
        fail(variant, at, f"its parameters do not load: {short(fault)}", advice)
    except InvalidInput as fault:
        fail(variant, at, f"it cannot be created: {fault}", "Correct the golden case's options")
    return made


def _one(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.precise)


CHECKS = (Check(check_golden_cases_are_reproduced, "values", _one, asks_more=True),)
