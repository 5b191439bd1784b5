"""Gradients: against the definition's in every dtype, against finite differences in float64, alone and shared. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.compare.tolerances import UNIT, Bound
from attnlab.conformance.oracle.cases import Case, each
from attnlab.conformance.oracle.derivatives import (
    Gradients,
    differentiated,
    direction_for,
    gradients,
    recorded,
    slopes,
    trained,
)
from attnlab.conformance.oracle.features import normal
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.oracle.space import Row
from attnlab.conformance.running.check import Check, NotApplicable, Scope, precise, small


def check_query_key_and_value_may_be_one_tensor(variant: Any, case: Case) -> None:
    """Query, key and value that are one tensor get the output of three copies, and the sum of their gradients."""
    inputs = draw(case, variant)
    if len({inputs.query.shape, inputs.key.shape, inputs.value.shape}) > 1:
        raise NotApplicable("it cannot be made with query, key and value of one shape")
    x = inputs.key
    copies = inputs.with_tensors(query=x.clone(), key=x.clone(), value=x.clone())
    out, apart = differentiated(variant, copies)
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        answer = inputs.with_tensors(query=leaf, key=leaf, value=leaf).run(variant).out
        grads = slopes(answer, {"query": leaf}, direction_for(inputs))
    compare = Comparer(variant, copies)
    advice = "Tell query, key and value apart by place, never by identity or address"
    compare.same(answer.detach(), out, "three copies of the tensor", advice)
    total = {"query": apart["query"] + apart["key"] + apart["value"]}
    compare.same_gradients(grads, total, "the sum of the gradients of three copies", advice)


def check_gradients_do_not_depend_on_requires_grad_of_others(variant: Any, case: Case) -> None:
    """Each input's and each parameter's gradient is the same where nothing else needs one, and so is the output."""
    inputs, compare = drawn(case, variant)
    parameters, direction = trained(variant), direction_for(inputs)
    out, together = differentiated(variant, inputs)
    tensors = {n: x.detach().clone() for n, x in inputs.tensors().items()}
    advice = "Judge each input's need by its own ctx.needs_input_grad entry, and choose no path by who needs a gradient"
    try:
        for name, expected in together.items():
            for other, parameter in parameters.items():
                parameter.requires_grad_(other == name)
            leaf = parameters[name] if name in parameters else tensors[name].clone().requires_grad_()
            call = inputs.rebuilt(tensors if name in parameters else {**tensors, name: leaf})
            with torch.enable_grad(), seeded_draws(case.seed, case.device):
                answer = call.run(variant).out
            if not answer.requires_grad:
                fault = f"where only {name} needs a gradient, out is detached"
                compare.demand(not bool(expected.count_nonzero()), fault, advice)
                continue
            versus = f"the one of a call where everything needs a gradient (here only {name} does)"
            alone = slopes(answer, {name: leaf}, direction)
            compare.same_answer((answer.detach(), alone), (out, {name: expected}), versus, advice)
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(True)


def check_gradients_match_finite_differences(variant: Any, case: Case) -> None:
    """In float64 the slope along random directions is the one that the gradients predict."""
    inputs, compare = drawn(case, variant)
    direction = direction_for(inputs)
    _, grads = gradients(variant, inputs, direction)
    demand_slopes(compare, grads, lambda x: (x.out(variant) * direction).sum(), "the gradient")


def check_second_derivatives_match_finite_differences(variant: Any, case: Case) -> None:
    """In float64 the slope of the gradient is the one that double backward computes."""
    inputs, compare = drawn(case, variant)
    direction = direction_for(inputs)
    first, second = _directions(inputs)

    def gradient_along(tensors: dict[str, Tensor], create_graph: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = recorded(tensors)
        with torch.enable_grad():
            out = inputs.rebuilt(leaves).run(variant).out
            return _along(slopes(out, leaves, direction, create_graph=create_graph), first), leaves

    along, leaves = gradient_along(inputs.tensors(), create_graph=True)
    slope = _along(slopes(along, leaves), second)
    measured = _difference(lambda tensors: gradient_along(tensors)[0].detach(), inputs.tensors(), second)
    _demand_slope(compare, slope, measured, "the second derivative")


def check_gradients_honour_the_strides_of_grad_output(variant: Any, case: Case) -> None:
    """A transposed or expanded incoming gradient gives the same gradients as a contiguous copy of it."""
    inputs, compare = drawn(case, variant)
    dense = direction_for(inputs)
    transposed = dense.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = dense.new_ones(()).expand(dense.shape)
    for kind, direction in (("transposed", transposed), ("expanded", expanded)):
        _, expected = gradients(variant, inputs, direction.contiguous())
        versus = f"the gradient for a contiguous copy of the {kind} grad_output"
        advice = "Read grad_output through its strides, or call .contiguous() on it first"
        compare.same_gradients(gradients(variant, inputs, direction)[1], expected, versus, advice)


def demand_slopes(compare: Comparer, grads: Gradients, value_at: Callable[[Inputs], Tensor], what: str) -> None:
    """Fail unless the slopes of `value_at` along random directions are those that the gradients predict."""
    inputs = compare.inputs
    for step in _directions(inputs):
        measured = _difference(lambda tensors: value_at(inputs.rebuilt(tensors)), inputs.tensors(), step)
        _demand_slope(compare, _along(grads, step), measured, what)


def _along(grads: Gradients, step: dict[str, Tensor]) -> Tensor:
    """The slope along `step` that gradients predict."""
    return torch.stack([(grads[n] * d).sum() for n, d in step.items()]).sum()


def _directions(inputs: Inputs) -> list[dict[str, Tensor]]:
    """Two random directions in which the tensors are moved."""
    generator = torch.Generator().manual_seed(inputs.case.seed + 5)
    # sinks of -inf and biases of -inf are constants: there is no slope along them
    return [
        {n: torch.where(x.isfinite(), normal(generator, *x.shape).to(x.device), 0) for n, x in inputs.tensors().items()}
        for _ in range(2)
    ]


def _difference(value_at: Any, base: dict[str, Tensor], step: dict[str, Tensor]) -> Tensor:
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


def _demand_slope(compare: Comparer, slope: Tensor, measured: Tensor, what: str) -> None:
    """Fail unless the slope that gradients predict is the one that was measured."""
    # Extrapolated differences err by about h^4 f^(5) / 480 (truncation) + 3 u |f| / h (rounding): with h = u^(1/3) the latter is
    # 1e-10 times the size of f, and fifth derivatives may be as large as 1e16 before they matter.
    size = max(1.0, abs(float(measured)))
    origin = "extrapolated differences with h = u^(1/3): 1e4 u^(2/3) |slope|"
    limit = Bound(1e4 * UNIT["float64"] ** (2 / 3) * size, origin)
    versus, advice = (
        "the slope by central differences",
        "Check the backward term by term; detach() and no_grad() drop terms",
    )
    compare.close(slope.reshape(1), measured.reshape(1), limit, versus, advice, what=f"the slope by {what}")


ROUGH = ("contents", "layout", "dtype")
"""Axes that say nothing of derivatives, or have none."""
_TINY: dict[str, Any] = {"dtype": "float64", "needs": ("backward",), "batch": 1, "query_length": 4, "key_length": 4}


def _precise(scope: Scope) -> Iterable[Case]:
    """In float64, of four queries and keys: differences cost a call for each direction, and hold for smooth arguments only."""
    return scope.requests("backward", without=(*ROUGH, "batch"), change=_tiny, full=40, quick=10, seed=13000)


def _tiny(row: Row) -> Row | None:
    queries, keys = row["lengths"]
    heads, kv_heads = row["heads"]
    if heads > 4:
        heads, kv_heads = (2, 1) if kv_heads < heads else (2, 2)
    sizes = {"lengths": (4, 4 if queries == keys else 5), "heads": (heads, kv_heads), "batch": 1}
    return precise({**row, **sizes, "dtype": "float64"})


def _double(scope: Scope) -> Iterable[Case]:
    yield from each("", "causal", **_TINY)
    yield from scope.requests("backward", without=(*ROUGH, "batch"), change=_tiny, full=25, quick=6, seed=14000)


def _strided(scope: Scope) -> Iterable[Case]:
    return scope.requests("backward", without=("contents",), change=small, full=16, quick=4, seed=15000)


def _alike(scope: Scope) -> Iterable[Case]:
    return scope.cases("", "causal", needs=("backward",))


def _alone(scope: Scope) -> Iterable[Case]:
    return scope.requests("backward", without=("contents", "layout"), change=precise, full=16, quick=4, seed=16000)


_SMOOTH: dict[str, Any] = {"unless": ("surrogate_gradient",), "random_too": True}
_SECOND: dict[str, Any] = {"claims": ("double_backward",), **_SMOOTH}
CHECKS = (
    Check(check_gradients_match_finite_differences, "gradients", _precise, **_SMOOTH),
    Check(check_second_derivatives_match_finite_differences, "gradients", _double, **_SECOND),
    Check(check_gradients_honour_the_strides_of_grad_output, "gradients", _strided, random_too=True),
    Check(check_query_key_and_value_may_be_one_tensor, "gradients", _alike, random_too=True),
    Check(check_gradients_do_not_depend_on_requires_grad_of_others, "gradients", _alone, random_too=True),
)
