"""The output against the definition. Needs torch; run by `run_checks`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.cases import Case, case, in_dtypes, pairs, singles
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.inputs import Inputs, draw, exact_and_bound
from attnlab.conformance.messages import demand_close

QUICK_PAIRS = 23  # a prime stride through the list of pairs: every label is met, no two runs differ


def check_agrees_with_definition(variant: Any, case: Case) -> None:
    """Out equals the float64 definition within the derived bound."""
    _compare(
        variant, draw(case, variant), "Compare the order of CONTRACT section 2 and the formula, step by step"
    )


def check_survives_large_scores(variant: Any, case: Case) -> None:
    """Queries 30 times as large: scores in the hundreds neither overflow nor lose the sum."""
    inputs = draw(case, variant)
    _compare(
        variant,
        inputs.with_tensors(query=inputs.query * 30),
        "Subtract the row's maximum before exp (or divide numerator and normaliser by a common factor), "
        "and take sums in float32 or better",
    )


def _compare(variant: Any, inputs: Inputs, advice: str) -> None:
    with torch.no_grad():
        got = inputs.run(variant).out
    exact, limit = exact_and_bound(variant, inputs)
    demand_close(
        got, exact, limit, variant, inputs.case, what="out", versus="the float64 definition", advice=advice
    )


def _agreement(scope: Scope) -> Iterable[Case]:
    base = scope.base
    yield from singles(dtype=base)
    for labels in ((), ("causal",), ("key_mask_left",), ("gqa", "longer_keys")):
        for dtype in scope.dtypes:
            if labels == ("gqa", "longer_keys") or dtype != base:
                yield case(*labels, dtype=dtype)
    possible = [c for c in pairs(dtype=base) if not c.missing(scope.capabilities)]
    if scope.quick:
        yield from possible[:: max(1, len(possible) // QUICK_PAIRS)]
    else:
        yield from possible
        yield from in_dtypes((c for c in singles() if c.features), (d for d in scope.dtypes if d != base))
    # Past the tiles and chunks of usual kernels, at lengths that divide none of them.
    long = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "dtype": base, "seed": 3}
    sizes = (137,) if scope.quick else (137, 66)
    for length in sizes:
        for labels in ((), ("causal",), ("window",), ("key_mask_holes",), ("mask",)):
            yield case(*labels, **long, query_length=length, key_length=length)
        yield case("causal", **long, query_length=61, key_length=length)


def _large(scope: Scope) -> Iterable[Case]:
    cases = [case(), case("causal"), case("mask"), case("key_mask_right")]
    dtypes = scope.dtypes if not scope.quick else scope.dtypes[-2:]
    return in_dtypes((replace(c, note="30x queries") for c in cases), dtypes)


CHECKS = (
    Check(check_agrees_with_definition, "values", _agreement),
    Check(check_survives_large_scores, "values", _large),
)
