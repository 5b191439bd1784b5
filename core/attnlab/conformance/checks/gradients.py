"""Gradients: against the definition's in every dtype, against finite differences in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.extremes import EDGES
from attnlab.conformance.checks.values import together
from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import UNIT, Bound, bound, largest
from attnlab.conformance.oracle.cases import Case, case, singles
from attnlab.conformance.oracle.derivatives import defined_gradients, direction_for, gradients, recorded
from attnlab.conformance.oracle.features import FEATURES, normal
from attnlab.conformance.oracle.inputs import Inputs, draw, exact_and_bound, plain_dtype, reduction_terms
from attnlab.conformance.running.check import Check, Scope


def check_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients of query, key, value, bias, sinks, gates and parameters equal the definition's, and so does the out they go with."""
    inputs = _told(draw(case, variant))
    direction = direction_for(inputs)
    low = plain_dtype(case.dtype)
    visible = inputs.visible()
    out, found = gradients(variant, inputs, direction)
    right, near = exact_and_bound(variant, inputs)
    demand_close(
        out,
        right,
        near,
        variant,
        case,
        what="out",
        versus="the float64 definition (while gradients are recorded)",
        advice="The path that autograd records must compute what the other path computes",
    )
    exact = defined_gradients(variant, inputs, direction, visible=visible)
    plain = defined_gradients(variant, inputs, direction, getattr(torch, low), visible=visible)
    for name, expected in exact.items():
        limit = bound(
            case.dtype,
            exact=expected,
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case) * (case.batch if expected.dim() < 4 else 1),
            magnitude=largest(direction) * largest(inputs.value),
        )
        demand_close(
            found[name],
            expected,
            limit,
            variant,
            case,
            what=f"gradient of {name}",
            versus="the gradient of the float64 definition",
            advice="Its own backward must use the forward's masks, scale and order; sum broadcast axes back to their shape",
        )


def check_gradients_match_finite_differences(variant: Any, case: Case) -> None:
    """In float64 the slope along random directions is the one that the gradients predict."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)

    def value_at(tensors: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            out: Tensor = inputs.rebuilt(tensors).run(variant).out
        return (out * direction).sum()

    _, found = gradients(variant, inputs, direction)
    base = inputs.tensors()
    for step in directions(base, case, 2):
        slope = sum(((found[n] * d).sum() for n, d in step.items()), start=torch.zeros((), dtype=torch.float64))
        demand_slope(variant, case, slope, difference(value_at, base, step), "the gradient")


def check_second_derivatives_match_finite_differences(variant: Any, case: Case) -> None:
    """In float64 the slope of the gradient is the one that double backward computes."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)
    first, second = directions(inputs.tensors(), case, 2)

    def gradient_along(tensors: dict[str, Tensor], create_graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = recorded(tensors)
        with torch.enable_grad():
            out = inputs.rebuilt(leaves).run(variant).out
            found = torch.autograd.grad(
                out,
                list(leaves.values()),
                direction,
                create_graph=create_graph,
                materialize_grads=True,
                allow_unused=True,
            )
            return sum(((g * first[n]).sum() for n, g in zip(leaves, found, strict=True)), torch.zeros(())), leaves

    along, leaves = gradient_along(inputs.tensors(), create_graph=True)
    found = torch.autograd.grad(along, list(leaves.values()), allow_unused=True, materialize_grads=True)
    slope = sum(((g * second[n]).sum() for n, g in zip(leaves, found, strict=True)), torch.zeros(()))
    measured = difference(lambda tensors: gradient_along(tensors)[0].detach(), inputs.tensors(), second)
    demand_slope(variant, case, slope, measured, "the second derivative")


def check_gradients_honour_the_strides_of_grad_output(variant: Any, case: Case) -> None:
    """A transposed or expanded incoming gradient gives the same gradients as a contiguous copy of it."""
    inputs = draw(case, variant)
    dense = direction_for(inputs)
    transposed = dense.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = dense.new_ones(()).expand(dense.shape)
    for kind, direction in (("transposed", transposed), ("expanded", expanded)):
        _, expected = gradients(variant, inputs, direction.contiguous())
        _, found = gradients(variant, inputs, direction)
        for name, gradient in expected.items():
            size = max(largest(gradient), largest(direction) * largest(inputs.value))
            limit = Bound(
                4 * UNIT[case.dtype] * reduction_terms(case) * size, "rounding of two runs on the same numbers"
            )
            demand_close(
                found[name],
                gradient,
                limit,
                variant,
                case,
                what=f"gradient of {name}",
                versus=f"the gradient for a contiguous copy of the {kind} grad_output",
                advice="Read grad_output through its strides, or call .contiguous() on it first",
            )


def _told(inputs: Inputs) -> Inputs:
    """The inputs; noted `opposed`, with scores far below 0, where a backward needs the row's maximum too; or at an end of theirs."""
    note = inputs.case.note
    if note == "opposed":
        return inputs.with_tensors(query=inputs.query + 6, key=inputs.key - 6)
    return inputs.with_tensors(**EDGES[note].make(inputs)) if note in EDGES else inputs


def directions(tensors: dict[str, Tensor], case: Case, count: int) -> list[dict[str, Tensor]]:
    """Random directions in which the tensors are moved."""
    generator = torch.Generator().manual_seed(case.seed + 5)
    # sinks of -inf and biases of -inf are constants: there is no slope along them
    return [
        {n: torch.where(x.isfinite(), normal(generator, *x.shape).to(x.device), 0) for n, x in tensors.items()}
        for _ in range(count)
    ]


def difference(value_at: Any, base: dict[str, Tensor], step: dict[str, Tensor]) -> Tensor:
    """The slope of `value_at` along `step`, by central differences of two widths, extrapolated (Richardson).

    Where a normaliser is small third derivatives are huge; what they do to one difference, they do four times to that of twice
    the width.
    """

    def central(h: float) -> Tensor:
        up, down = ({n: x + sign * h * step[n] for n, x in base.items()} for sign in (1, -1))
        result: Tensor = (value_at(up) - value_at(down)) / (2 * h)
        return result

    return (4 * central(_H / 2) - central(_H)) / 3


_H = UNIT["float64"] ** (1 / 3)


def demand_slope(variant: Any, case: Case, slope: Tensor, measured: Tensor, what: str) -> None:
    """Fail unless the slope that gradients predict is the one that was measured."""
    # Extrapolated differences err by about h^4 f^(5) / 480 (truncation) + 3 u |f| / h (rounding): with h = u^(1/3) the latter is
    # 1e-10 times the size of f, and fifth derivatives may be as large as 1e16 before they matter.
    size = max(1.0, abs(float(measured)))
    limit = Bound(
        1e4 * UNIT["float64"] ** (2 / 3) * size, "extrapolated differences with h = u^(1/3): 1e4 u^(2/3) |slope|"
    )
    demand_close(
        slope.reshape(1),
        measured.reshape(1),
        limit,
        variant,
        case,
        what=f"the slope by {what}",
        versus="the slope by central differences",
        advice="Check the backward term by term; detach() and no_grad() drop terms",
    )


def _cases(scope: Scope) -> Iterable[Case]:
    plain = [replace(c, needs=("backward",)) for c in singles(dtype=scope.base)]
    yield from plain
    for dtype in scope.dtypes:
        if dtype != scope.base:
            yield case(needs=("backward",), dtype=dtype)
            yield case("causal", needs=("backward",), dtype=dtype)
    yield case("causal", "gqa", needs=("backward",), dtype=scope.base)
    yield case("causal", "longer_keys", needs=("backward",), dtype=scope.base)
    yield case("mask_of_each", "bias_of_each", "gqa", needs=("backward",), dtype=scope.base)
    yield case("causal", needs=("backward",), dtype=scope.base, batch=1, query_length=71, key_length=71)
    if not (scope.quick and scope.stepwise):
        yield case(needs=("backward",), dtype=scope.base, batch=1, query_length=133, key_length=133)
    sizes: dict[str, Any] = {"needs": ("backward",), "dtype": scope.base}
    if not scope.stepwise:
        yield case(*declared(scope, "causal"), **sizes, note="opposed")
    tiles = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": 70, "key_length": 70}
    for labels in (("window", "bias"), ("softcap", "sinks", "key_mask_holes"), ("segments",)):
        yield case(*declared(scope, *labels), **sizes, **tiles)
    if scope.quick:
        return
    for labels in (("causal", "bias_per_key", "mask_mod"), ("left_window", "scale"), ("mask", "score_mod")):
        yield case(*declared(scope, *labels), **sizes, **tiles)
    yield case(*declared(scope, "bottom_right", "gqa"), **sizes, query_length=41, key_length=70)
    yield case("window", "key_mask_holes", **sizes, query_length=193, key_length=193)
    for note in ("bias of zeros", "bias per row", "bias per head", "bias of everything"):
        edge = EDGES[note]
        for more in ({}, tiles):
            yield case(*declared(scope, *edge.labels), needs=("backward", "bias"), dtype=scope.base, note=note, **more)
    for note in (
        "softcap=150 and large scores",
        "sinks=200",
        "scale=0",
        "score_mod that hides",
        "window=(70, 5) of many",
        "lengths far apart",
        "offsets far apart",
    ):
        edge = EDGES[note]
        yield case(needs=("backward", *edge.needs), dtype=scope.base, note=note, **edge.sizes)
    # A width that kernels have a path of their own for, with what such a path may leave out.
    yield case(*declared(scope, "mask", "bias", "scale"), **sizes, head_dim=64, key_dim=64, value_dim=64)
    if scope.family == "feature_map":
        return  # with few keys left its sums may be near 0, and the quotient's gradient is all cancellation
    for one in together(scope, 12):
        yield replace(one, needs=(*one.needs, "backward"))


def _precise(scope: Scope) -> Iterable[Case]:
    labels = ("causal", "mask", "bias", "softcap", "score_mod", "sinks", "scale", "key_mask_holes", "gqa", "value_dim")
    sizes = {"dtype": "float64", "needs": ("backward",), "batch": 1, "query_length": 4, "key_length": 4}
    for label in ("", *labels):
        yield case(*([label] if label else []), **{**sizes, **FEATURES[label].sizes} if label else sizes)


def _double(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": "float64", "needs": ("backward",), "batch": 1, "query_length": 4, "key_length": 4}
    yield case(**sizes)
    yield case("causal", **sizes)
    for labels in (("softcap",), ("bias", "sinks"), ("gqa",)):
        yield case(*declared(scope, *labels), **sizes, note=" ".join(labels))


def _strided(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("gqa",)):
        yield case(*labels, needs=("backward",), dtype=scope.base)


CHECKS = (
    Check(check_gradients_match_definition, "gradients", _cases),
    Check(check_gradients_match_finite_differences, "gradients", _precise, random_too=True),
    Check(
        check_second_derivatives_match_finite_differences,
        "gradients",
        _double,
        claims=("double_backward",),
        random_too=True,
    ),
    Check(check_gradients_honour_the_strides_of_grad_output, "gradients", _strided, random_too=True),
)
