"""Narrow dtypes: sums, scores past their range, autocast, arguments of another dtype. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.cases import Case, case
from attnlab.conformance.check import Check, NotApplicable, Scope
from attnlab.conformance.inputs import FLOAT_ARGUMENTS, draw, exact_and_bound
from attnlab.conformance.messages import demand, demand_close
from attnlab.conformance.tolerances import UNIT, Bound

HALF = ("bfloat16", "float16")


def check_sums_are_taken_in_float32(variant: Any, case: Case) -> None:
    """A normalised mean of 5000 equal values is that value, although the sums leave the dtype's range."""
    if variant.capabilities.null_key:
        raise NotApplicable("it declares null_key: a slot without a value takes part of the weight")
    inputs = draw(case, variant)
    # Features of a kernelised variant are 19 and more here, so that 5000 of them pass float16's 65504.
    same = inputs.with_tensors(
        query=torch.full_like(inputs.query, 0.5),
        key=torch.full_like(inputs.key, 19.0),
        value=torch.ones_like(inputs.value),
    )
    with torch.no_grad():
        got = same.run(variant).out
    # Equal weights and equal values: numerator and normaliser are the same sum, so only the storing rounds.
    limit = Bound(4 * UNIT[case.dtype], "4 roundings of a result of 1; numerator and normaliser are one sum")
    demand_close(
        got,
        torch.ones_like(got, dtype=torch.float64),
        limit,
        variant,
        case,
        what="out",
        versus="the value 1 that all keys carry",
        advice="Take sums over keys in float32 or better, whatever the inputs' dtype",
    )


def check_scores_may_exceed_half_precision(variant: Any, case: Case) -> None:
    """Scores of 1e5, which float16 cannot hold, give the definition's answer, dead rows included."""
    drawn = draw(case, variant)
    inputs = drawn.with_tensors(query=drawn.query * 200, key=drawn.key * 200)
    with torch.no_grad():
        got = inputs.run(variant).out
    exact, limit = exact_and_bound(variant, inputs)
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="out",
        versus="the float64 definition (query and key x 200)",
        advice="Compute and hide scores in float32; a fill such as -1e4 or -1e9 is no substitute for -inf",
    )


def check_autocast_agrees(variant: Any, case: Case) -> None:
    """Under autocast a float32 call gives the answer of a bfloat16 call, in bfloat16."""
    inputs = draw(case, variant)
    lower = {n: x.to(torch.bfloat16) for n, x in inputs.tensors().items()}
    half = replace(inputs.rebuilt(lower), case=replace(case, dtype="bfloat16"))
    with torch.no_grad(), torch.autocast(case.device.split(":")[0], dtype=torch.bfloat16):
        got = inputs.run(variant).out
    demand(
        got.dtype == torch.bfloat16,
        variant,
        case,
        f"under autocast to bfloat16 out has dtype {got.dtype}",
        "Return out in the dtype of the query that attend() is handed",
    )
    exact, limit = exact_and_bound(variant, half)
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="out",
        versus="the float64 definition (autocast to bfloat16)",
        advice="Inside autocast torch casts matrix products down: cast explicitly, or disable autocast around sums",
    )


def check_bias_and_sinks_may_have_another_dtype(variant: Any, case: Case) -> None:
    """Bias and sinks in float32 or float64 beside a query of another dtype are used as they are."""
    inputs = draw(case, variant)
    for dtype in (torch.float32, torch.float64):
        given = {n: inputs.arguments[n].to(dtype) for n in FLOAT_ARGUMENTS if n in inputs.arguments}
        changed = inputs.with_tensors(**given)
        exact, limit = exact_and_bound(
            variant, changed
        )  # of the numbers that are given, whatever their dtype
        with torch.no_grad():
            got = changed.run(variant).out
        demand_close(
            got,
            exact,
            limit,
            variant,
            case,
            what="out",
            versus=f"the float64 definition ({', '.join(given)} in {dtype})",
            advice="Any float dtype is legal: cast to the dtype that scores are computed in",
        )


def _sums(scope: Scope) -> Iterable[Case]:
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": 3, "key_length": 5000}
    for dtype in HALF:
        yield case(needs=("cross_lengths",), dtype=dtype, **sizes)


def _overflowing(scope: Scope) -> Iterable[Case]:
    if scope.family == "score":
        for labels in ((), ("causal",), ("mask",), ("key_mask_left",)):
            yield case(*labels, dtype="float16")


def _autocast(scope: Scope) -> Iterable[Case]:
    if "bfloat16" in scope.capabilities.dtypes:
        for labels in ((), ("causal",), ("bias",), ("mask",), ("gqa",)):
            yield case(*labels, dtype="float32", note="autocast")


def _mixed(scope: Scope) -> Iterable[Case]:
    for dtype in scope.dtypes:
        for labels in (("bias",), ("sinks",), ("causal", "bias_per_key")):
            yield case(*labels, dtype=dtype)


CHECKS = (
    Check(check_sums_are_taken_in_float32, "dtypes", _sums, claims=("normalised",), asks_more=True),
    Check(check_scores_may_exceed_half_precision, "dtypes", _overflowing),
    Check(check_autocast_agrees, "dtypes", _autocast),
    Check(check_bias_and_sinks_may_have_another_dtype, "dtypes", _mixed),
)
