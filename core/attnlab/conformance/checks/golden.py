"""Golden cases: numbers from outside, which variant and definition must both reproduce. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import Bound, derived, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, draw, has_definition, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.formulas import GoldenCase, golden_cases


def check_golden_cases_are_reproduced(variant: Any, case: Case) -> None:
    """The output on every golden case, and the definition's, is the one that is written down."""
    found = golden_cases(variant)
    if not found:
        raise NotApplicable("it has no golden cases")
    require_exact(variant, draw(case, variant))
    refusals = []
    for one in found:
        try:
            _compare(variant, case, one)
        except UnsupportedRequest as refusal:
            refusals.append(str(refusal))
    if len(refusals) == len(found):
        raise NotApplicable(f"it refuses every golden case: {refusals[0]}")


def _compare(variant: Any, case: Case, one: GoldenCase) -> None:
    dtype = getattr(torch, case.dtype)
    query, key, value, expected = (one.tensor(n, dtype) for n in ("query", "key", "value", "out"))
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
    judged = _made_for(variant, at, one, dtype)
    tensors = {n: x.to(case.device) for n, x in (("query", query), ("key", key), ("value", value))}
    inputs = Inputs(at, **tensors, arguments=_moved(one.call(dtype), case.device))
    with torch.no_grad():
        got = inputs.run(judged).out
    size = max(largest(expected), largest(value))
    rounding = derived(case.dtype, reduction_terms(at), size)
    limit = Bound(
        rounding + 0.5 * 10.0**-one.decimals, f"{one.decimals} decimals are written down, + {rounding:.2e}, rounding"
    )
    expected = expected.to(case.device)

    def demand_equal(answer: Tensor, what: str, advice: str) -> None:
        demand_close(answer, expected, limit, judged, at, what=what, versus="the golden case", advice=advice)

    demand_equal(
        got, "out", "The formula itself is wrong: compare with the paper term by term, signs and order included"
    )
    if has_definition(judged):
        defined = define(judged, inputs)["out"]
        demand_equal(
            defined, "the definition's out", "The variant agrees with the golden case, its definition does not"
        )


def _made_for(variant: Any, at: Case, one: GoldenCase, dtype: torch.dtype) -> Any:
    # An option that is off may be one that this variant does not have.
    decided = {n: x for n, x in one.options.items() if x or n in variant.options}
    options = {**variant.options, **decided, **one.extra_options}
    judged = type(variant)(**at.geometry, **options)
    judged.name = variant.name
    state = one.state_dict(dtype)
    try:
        judged = judged.to(at.device, dtype).eval()
        judged.load_state_dict(state)
    except RuntimeError as fault:
        demand(
            False,
            variant,
            at,
            f"its parameters do not load: {' '.join(str(fault).split())}",
            "GoldenCase.parameters is the whole state_dict, and extra_options are what its shapes need",
        )
    except InvalidInput as fault:
        demand(False, variant, at, f"it cannot be created: {fault}", "Correct the golden case's options")
    return judged


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {n: _moved(part, device) for n, part in x.items()}
    return x


def _one(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.precise)


CHECKS = (Check(check_golden_cases_are_reproduced, "values", _one, asks_more=True),)
