"""Runs of one variant that must agree, whatever surrounds them. Needs torch; used by the checks of graphs, threads and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.features import FEATURES
from attnlab.conformance.oracle.inputs import Inputs, reduction_terms
from attnlab.conformance.running.check import Scope


def plainly(variant: Any, inputs: Inputs, **more: Any) -> Tensor:
    """Out of one call without gradients; random numbers as `Inputs.run` draws them, also where `variant` is a function."""
    with torch.no_grad(), seeded_draws(inputs.case.seed, inputs.case.device):
        out: Tensor = inputs.run(variant, **more).out
        return out


def differentiated(
    call: Any, inputs: Inputs, parameters: Mapping[str, Tensor], direction: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Out of `call(query, key, value, **arguments)` and the gradients by input and parameter name; draws as in `plainly`."""
    leaves = recorded(inputs.tensors())
    rebuilt = inputs.rebuilt(leaves)
    with torch.enable_grad(), seeded_draws(inputs.case.seed, inputs.case.device):
        out = rebuilt.run(call).out
        found = torch.autograd.grad(
            out,
            [*leaves.values(), *parameters.values()],
            direction_for(inputs) if direction is None else direction,
            allow_unused=True,
            materialize_grads=True,
        )
    return out.detach(), dict(zip([*leaves, *parameters], found, strict=True))


def agree(
    variant: Any, inputs: Inputs, got: Tensor, expected: Tensor, *, versus: str, advice: str, what: str = "out"
) -> None:
    """Fail unless two runs of one variant agree within rounding; `what` may be a gradient."""
    case = inputs.case
    size = max(largest(expected), largest(inputs.value))
    terms = reduction_terms(case)
    if what.startswith("gradient"):
        size = max(size, largest(direction_for(inputs)) * largest(inputs.value))
        terms *= 1 if expected.dim() == 4 else case.batch  # others are sums over the batch too
    limit = rounding_bound(case.dtype, terms=terms, magnitude=size)
    demand_close(got, expected, limit, variant, case, what=what, versus=versus, advice=advice)


def agree_in_all(
    variant: Any,
    inputs: Inputs,
    got: tuple[Tensor, Mapping[str, Tensor]],
    expected: tuple[Tensor, Mapping[str, Tensor]],
    *,
    versus: str,
    advice: str,
) -> None:
    """`agree` for out and every gradient, as `differentiated` returns them."""
    agree(variant, inputs, got[0], expected[0], versus=versus, advice=advice)
    for name, gradient in expected[1].items():
        agree(variant, inputs, got[1][name], gradient, what=f"gradient of {name}", versus=versus, advice=advice)


def declared(scope: Scope, *labels: str) -> tuple[str, ...]:
    """Those labels whose every askable is declared: a case that uses as many of them as this variant can."""
    have = scope.capabilities
    return tuple(x for x in labels if all(have.declares(name) for name in FEATURES[x].askables))
