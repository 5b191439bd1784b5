"""Narrow dtypes: sums, scores past their range, autocast, arguments of another dtype. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._averages import require_average
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.compare.advice import of_precision
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import UNIT, Bound, bound, derived, gamma, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import defined_gradients, direction_for, recorded, trained
from attnlab.conformance.oracle.inputs import FLOAT_ARGUMENTS, Inputs, define, draw, exact_and_bound, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope

HALF = ("bfloat16", "float16")


def check_sums_are_taken_in_float32(variant: Any, case: Case) -> None:
    """A normalised mean of 5000 equal values is that value, although the sums leave the dtype's range; of others, their mean."""
    if variant.capabilities.null_key:
        raise NotApplicable("it declares null_key: a slot without a value takes part of the weight")
    inputs = draw(case, variant)
    require_average(variant, inputs)
    # Features of a kernelised variant are 19 and more here, so that 5000 of them pass float16's 65504.
    same = inputs.with_tensors(
        query=torch.full_like(inputs.query, 0.5),
        key=torch.full_like(inputs.key, 19.0),
        value=torch.ones_like(inputs.value),
    )
    # Equal weights and equal values: numerator and normaliser are the same sum, so only the storing rounds.
    limit = Bound(4 * UNIT[case.dtype], "4 roundings of a result of 1; numerator and normaliser are one sum")
    _demand_mean(variant, same, limit, "the value 1 that all keys carry")
    if not (variant.capabilities.position_free and variant.capabilities.exact):
        return
    other = same.with_tensors(value=1 + inputs.value.abs() / 4)
    mean = other.value.double().mean(2, keepdim=True)
    with torch.no_grad():
        if largest(define(variant, other)["out"] - mean) > 1e-6:
            return  # equal keys need not share the weight: an argmax gives it to one of them
    rest = 2 * gamma(case.key_length, UNIT["float32"]) * largest(other.value)
    limit = Bound(
        4 * UNIT[case.dtype] * largest(other.value) + rest,
        f"4 roundings of the result, + {rest:.1e}, two float32 sums of {case.key_length} terms",
    )
    _demand_mean(variant, other, limit, "the mean of the values, as all keys are equal")


def _demand_mean(variant: Any, inputs: Inputs, limit: Bound, versus: str) -> None:
    with torch.no_grad():
        got = inputs.run(variant).out
    demand_close(
        got,
        inputs.value.double().mean(2, keepdim=True).expand(got.shape),
        limit,
        variant,
        inputs.case,
        what="out",
        versus=versus,
        advice=of_precision(
            variant,
            inputs.case,
            "Take sums over keys in float32 or better, whatever the inputs' dtype, from tile to tile as well",
        ),
    )


def check_scores_may_exceed_half_precision(variant: Any, case: Case) -> None:
    """Scores of 1e5 and of -1e5, which float16 cannot hold, give the definition's answer, dead rows included."""
    drawn = draw(case, variant)
    # Each key's scores are 5% and more below the next one's: whatever rounds them, the largest takes all weight.
    steps = 130 + 10 * torch.randperm(case.key_length, generator=torch.Generator().manual_seed(6))
    far = -steps.to(drawn.key)[:, None].expand_as(drawn.key).contiguous()
    for told, inputs in (
        ("query and key x 200", drawn.with_tensors(query=drawn.query * 200, key=drawn.key * 200)),
        ("every score far below 0", drawn.with_tensors(query=torch.full_like(drawn.query, 200.0), key=far)),
    ):
        with torch.no_grad():
            got = inputs.run(variant).out
        exact, limit = exact_and_bound(variant, inputs)
        if inputs.key is far and _overflows(variant, inputs):
            rest = derived(case.dtype, reduction_terms(case), largest(inputs.value))
            limit = Bound(rest, "rounding alone: the plain formula overflows in float16, which excuses nothing")
        demand_close(
            got,
            exact,
            limit,
            variant,
            case,
            what="out",
            versus=f"the float64 definition ({told})",
            advice=of_precision(
                variant,
                case,
                "Compute and hide scores in float32; a fill such as -1e4, -1e9 or the dtype's least is no substitute for -inf",
            ),
        )


def _overflows(variant: Any, inputs: Inputs) -> bool:
    """Whether the definition in the case's dtype loses the normaliser of a row."""
    with torch.no_grad():
        exact, plain = (
            define(variant, inputs, dtype=dtype).get("lse") for dtype in (torch.float64, inputs.query.dtype)
        )
    return exact is not None and plain is not None and bool((exact.isfinite() & ~plain.isfinite()).any())


def check_autocast_agrees(variant: Any, case: Case) -> None:
    """Under autocast a float32 call gives the answer of a call in the lower dtype, in that dtype."""
    inputs, lower = draw(case, variant), _autocast_dtype(case)
    with torch.no_grad(), torch.autocast(case.device.split(":")[0], dtype=lower):
        got = inputs.run(variant).out
    demand(
        got.dtype == lower,
        variant,
        case,
        f"under autocast to {lower} out has dtype {got.dtype}",
        "Return out in the dtype of the query that attend() is handed",
    )
    exact, limit = exact_and_bound(variant, _cast(inputs, lower))
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="out",
        versus=f"the float64 definition (autocast to {lower})",
        advice=of_precision(
            variant,
            case,
            "Inside autocast torch casts matrix products down: cast explicitly, or disable autocast around sums",
        ),
    )


def check_autocast_gradients_agree(variant: Any, case: Case) -> None:
    """Gradients of a call under autocast reach float32 leaves, in float32, and are those of a call in the lower dtype."""
    inputs, lower = draw(case, variant), _autocast_dtype(case)
    leaves, parameters = recorded(inputs.tensors()), trained(variant)
    direction = direction_for(inputs)
    with torch.enable_grad():
        with torch.autocast(case.device.split(":")[0], dtype=lower):
            out = inputs.rebuilt(leaves).run(variant).out
        found = torch.autograd.grad(  # outside, as in training
            out,
            [*leaves.values(), *parameters.values()],
            direction.to(out.dtype),
            allow_unused=True,
            materialize_grads=True,
        )
    half = _cast(inputs, lower)
    same = direction.to(lower)
    exact = defined_gradients(variant, half, same)
    plain = defined_gradients(variant, half, same, lower)
    for name, gradient in zip([*leaves, *parameters], found, strict=True):
        limit = bound(
            half.case.dtype,
            exact=exact[name],
            plain=plain[name],
            plain_dtype=half.case.dtype,
            terms=reduction_terms(case) * (case.batch if gradient.dim() < 4 else 1),
            magnitude=largest(direction) * largest(inputs.value),
        )
        demand_close(
            gradient,
            exact[name],
            limit,
            variant,
            case,
            what=f"gradient of {name}",
            versus=f"the definition's (forward under autocast to {lower}, backward outside)",
            advice="A backward of its own runs outside autocast: cast what it multiplies, as its forward did",
        )


def _autocast_dtype(case: Case) -> torch.dtype:
    return torch.float16 if "float16" in case.note else torch.bfloat16


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    cast = {n: x.to(dtype) for n, x in inputs.tensors().items()}
    return replace(inputs.rebuilt(cast), case=replace(inputs.case, dtype=str(dtype).removeprefix("torch.")))


def check_bias_and_sinks_may_have_another_dtype(variant: Any, case: Case) -> None:
    """Bias and sinks in float32 or float64 beside a query of another dtype are used as they are."""
    inputs = draw(case, variant)
    for dtype in (torch.float32, torch.float64):
        given = {n: inputs.arguments[n].to(dtype) for n in FLOAT_ARGUMENTS if n in inputs.arguments}
        changed = inputs.with_tensors(**given)
        exact, limit = exact_and_bound(variant, changed)  # of the numbers that are given, whatever their dtype
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


def _autocast(*needs: str) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        if "bfloat16" in scope.dtypes:
            for labels in ((), ("causal",), ("bias",), ("mask",), ("gqa",)):
                yield case(*labels, needs=needs, dtype="float32", note="autocast")
            yield case(
                *declared(scope, "softcap", "sinks", "key_mask_left"), needs=needs, dtype="float32", note="autocast"
            )
        if "float16" in scope.dtypes and not scope.quick:
            for more in ((), ("causal", "gqa")):
                yield case(*declared(scope, *more), needs=needs, dtype="float32", note="autocast float16")

    return make


def _mixed(scope: Scope) -> Iterable[Case]:
    for dtype in scope.dtypes:
        for labels in (("bias",), ("sinks",), ("causal", "bias_per_key")):
            yield case(*labels, dtype=dtype)


CHECKS = (
    Check(check_sums_are_taken_in_float32, "dtypes", _sums, claims=("normalised",), asks_more=True, random_too=True),
    Check(check_scores_may_exceed_half_precision, "dtypes", _overflowing),
    Check(check_autocast_agrees, "dtypes", _autocast()),
    Check(check_autocast_gradients_agree, "dtypes", _autocast("backward")),
    Check(check_bias_and_sinks_may_have_another_dtype, "dtypes", _mixed),
)
