"""Narrow dtypes: sums, scores past their range, autocast, arguments of another dtype. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._averages import no_null_slot, require_average
from attnlab.conformance.compare.advice import of_precision
from attnlab.conformance.compare.comparer import DEFINITION, drawn
from attnlab.conformance.compare.tolerances import UNIT, Bound, derived, gamma, largest
from attnlab.conformance.oracle.bounds import exact_and_bound, exact_gradients_and_bounds
from attnlab.conformance.oracle.cases import Case, case, each
from attnlab.conformance.oracle.derivatives import direction_for, recorded, slopes, trained
from attnlab.conformance.oracle.inputs import FLOAT_ARGUMENTS, Inputs, define, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope

HALF = ("bfloat16", "float16")


def check_long_sums_accumulate_in_float32(variant: Any, case: Case) -> None:
    """A normalised mean of 5000 equal values is that value, although the sums leave the dtype's range; of others, their mean."""
    no_null_slot(variant)
    inputs, compare = drawn(case, variant)
    require_average(variant, inputs)
    advice = "Take sums over keys in float32 or better, whatever the inputs' dtype, from tile to tile as well"

    def demand_mean(call: Inputs, limit: Bound, versus: str) -> None:
        got = call.out(variant)
        mean = call.value.double().mean(2, keepdim=True).expand(got.shape)
        compare.close(got, mean, limit, versus, of_precision(variant, case, advice))

    # Features of a kernelised variant are 19 and more here, so that 5000 of them pass float16's 65504.
    same = inputs.with_tensors(
        query=torch.full_like(inputs.query, 0.5),
        key=torch.full_like(inputs.key, 19.0),
        value=torch.ones_like(inputs.value),
    )
    # Equal weights and equal values: numerator and normaliser are the same sum, so only the storing rounds.
    limit = Bound(4 * UNIT[case.dtype], "4 roundings of a result of 1; numerator and normaliser are one sum")
    demand_mean(same, limit, "the value 1 that all keys carry")
    if not (variant.capabilities.position_free and variant.capabilities.exact):
        return
    other = same.with_tensors(value=1 + inputs.value.abs() / 4)
    with torch.no_grad():
        if largest(define(variant, other)["out"] - other.value.double().mean(2, keepdim=True)) > 1e-6:
            return  # equal keys need not share the weight: an argmax gives it to one of them
    size = largest(other.value)
    rest = 2 * gamma(case.key_length, UNIT["float32"]) * size
    origin = f"4 roundings of the result, + {rest:.1e}, two float32 sums of {case.key_length} terms"
    demand_mean(
        other, Bound(4 * UNIT[case.dtype] * size + rest, origin), "the mean of the values, as all keys are equal"
    )


def check_scores_may_exceed_half_precision(variant: Any, case: Case) -> None:
    """Scores of 1e5 and of -1e5, which float16 cannot hold, give the definition's answer, dead rows included."""
    plain, compare = drawn(case, variant)
    # Each key's scores are 5% and more below the next one's: whatever rounds them, the largest takes all weight.
    steps = 130 + 10 * torch.randperm(case.key_length, generator=torch.Generator().manual_seed(6))
    far = -steps.to(plain.key)[:, None].expand_as(plain.key).contiguous()
    advice = (
        "Compute and hide scores in float32; a fill such as -1e4, -1e9 or the dtype's least is no substitute for -inf"
    )
    for contents, inputs in (
        ("query and key x 200", plain.with_tensors(query=plain.query * 200, key=plain.key * 200)),
        ("every score far below 0", plain.with_tensors(query=torch.full_like(plain.query, 200.0), key=far)),
    ):
        got = inputs.out(variant)
        exact, limit = exact_and_bound(variant, inputs)
        if inputs.key is far and _overflows(variant, inputs):
            rest = derived(case.dtype, reduction_terms(case), largest(inputs.value))
            limit = Bound(rest, "rounding alone: the plain formula overflows in float16, which excuses nothing")
        compare.close(got, exact, limit, f"{DEFINITION} ({contents})", of_precision(variant, case, advice))


def _overflows(variant: Any, inputs: Inputs) -> bool:
    """Whether the definition in the case's dtype loses the normaliser of a row."""
    with torch.no_grad():
        exact, plain = (
            define(variant, inputs, dtype=dtype).get("lse") for dtype in (torch.float64, inputs.query.dtype)
        )
    return exact is not None and plain is not None and bool((exact.isfinite() & ~plain.isfinite()).any())


def check_autocast_agrees(variant: Any, case: Case) -> None:
    """Under autocast a float32 call gives the answer of a call in the lower dtype, in that dtype."""
    inputs, compare = drawn(case, variant)
    lower = _autocast_dtype(case)
    with torch.autocast(case.device.split(":")[0], dtype=lower):
        got = inputs.out(variant)
    fault, advice = (
        f"under autocast to {lower} out has dtype {got.dtype}",
        "Return out in the dtype of attend()'s query",
    )
    compare.demand(got.dtype == lower, fault, advice)
    advice = "Inside autocast torch casts matrix products down: cast explicitly, or disable autocast around sums"
    exact, limit = exact_and_bound(variant, _cast(inputs, lower))
    compare.close(got, exact, limit, f"{DEFINITION} (autocast to {lower})", of_precision(variant, case, advice))


def check_autocast_gradients_agree(variant: Any, case: Case) -> None:
    """Gradients of a call under autocast reach float32 leaves, in float32, and are those of a call in the lower dtype."""
    inputs, compare = drawn(case, variant)
    lower, direction = _autocast_dtype(case), direction_for(inputs)
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        with torch.autocast(case.device.split(":")[0], dtype=lower):
            out = inputs.rebuilt(leaves).run(variant).out
        got = slopes(out, {**leaves, **trained(variant)}, direction.to(out.dtype))  # outside, as in training
    exact = exact_gradients_and_bounds(variant, _cast(inputs, lower), direction.to(lower))
    versus = f"the definition's (forward under autocast to {lower}, backward outside)"
    advice = "A backward of its own runs outside autocast: cast what it multiplies, as its forward did"
    compare.close_gradients(got, exact, advice, versus)


def _autocast_dtype(case: Case) -> torch.dtype:
    return torch.float16 if "float16" in case.note else torch.bfloat16


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    cast = inputs.changed(lambda x: x.to(dtype))
    return replace(cast, case=replace(inputs.case, dtype=str(dtype).removeprefix("torch.")))


def check_bias_and_sinks_may_have_another_dtype(variant: Any, case: Case) -> None:
    """Bias, sinks and gates of another float dtype than the query's are used as they are."""
    inputs, compare = drawn(case, variant)
    names = [n for n in inputs.tensors() if n in FLOAT_ARGUMENTS or n.startswith("gates.")]
    if not names:
        raise NotApplicable("no bias, no sinks and no gates are given")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        changed = inputs.changed(lambda x: x.to(dtype), *names)  # noqa: B023
        exact, limit = exact_and_bound(variant, changed)  # of the numbers of that dtype
        advice = "Any float dtype is legal: cast to the dtype that scores are computed in"
        compare.close(changed.out(variant), exact, limit, f"{DEFINITION} ({', '.join(names)} in {dtype})", advice)


def _sums(scope: Scope) -> Iterable[Case]:
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": 3, "key_length": 5000}
    return [case(needs=("cross_lengths",), dtype=dtype, **sizes) for dtype in HALF]


def _overflowing(scope: Scope) -> Iterable[Case]:
    return each("", "causal", "mask", "key_mask_left", dtype="float16") if scope.family == "score" else []


def _autocast(*needs: str) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        sizes: dict[str, Any] = {"needs": needs, "dtype": "float32"}
        if "bfloat16" in scope.dtypes:
            yield from scope.cases("", "causal", "bias", "mask", "gqa", **sizes, note="autocast")
            yield from scope.usable("softcap+sinks+key_mask_left", **sizes, note="autocast")
        if "float16" in scope.dtypes and not scope.quick:
            yield from scope.usable("", "causal+gqa", **sizes, note="autocast float16")

    return make


def _mixed(scope: Scope) -> Iterable[Case]:
    labels = ["bias", "sinks", "causal+bias_per_key", *["", "causal"] * scope.has_gates]
    return [c for dtype in scope.dtypes for c in each(*labels, dtype=dtype)]


CHECKS = (
    Check(
        check_long_sums_accumulate_in_float32,
        "dtypes",
        _sums,
        claims=("normalised", "exact"),
        asks_more=True,
        random_too=True,
    ),
    Check(check_scores_may_exceed_half_precision, "dtypes", _overflowing),
    Check(check_autocast_agrees, "dtypes", _autocast()),
    Check(check_autocast_gradients_agree, "dtypes", _autocast("backward")),
    Check(check_bias_and_sinks_may_have_another_dtype, "dtypes", _mixed),
)
