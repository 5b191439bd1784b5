"""The exact answer to a case and the bound on errors against it (see `compare.tolerances`). Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, bound, largest
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Gradients, defined_gradients
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, gradient_terms, reduction_terms


def plain_dtype(dtype: str) -> str:
    """The dtype in which the plain formula's error is measured (see tolerances)."""
    return "float32" if dtype == "float64" else dtype


def measured(case: Case, answer: Callable[[torch.dtype], Tensor], magnitude: float) -> tuple[Tensor, Bound]:
    """`answer` in float64, and the bound on errors against it by its own error in the case's dtype."""
    low = plain_dtype(case.dtype)
    with torch.no_grad():
        exact, plain = answer(torch.float64), answer(getattr(torch, low))
    terms = reduction_terms(case)
    return exact, bound(case.dtype, exact=exact, plain=plain, plain_dtype=low, terms=terms, magnitude=magnitude)


def measured_gradients(
    case: Case, answer: Callable[[torch.dtype], Gradients], magnitude: float
) -> dict[str, tuple[Tensor, Bound]]:
    """The same for gradients by name."""
    low = plain_dtype(case.dtype)
    exact, plain = answer(torch.float64), answer(getattr(torch, low))
    sizes: dict[str, Any] = {"plain_dtype": low, "magnitude": magnitude}
    return {
        n: (g, bound(case.dtype, exact=g, plain=plain[n], terms=gradient_terms(case, g), **sizes))
        for n, g in exact.items()
    }


def exact_and_bound(variant: Any, inputs: Inputs, what: str = "out", **view: Any) -> tuple[Tensor, Bound]:
    """The float64 answer named `what` ("out", "weights" or "lse") and the bound on errors against it.

    view: `visible` and `rows` as for `define`. `NotApplicable` for a variant that is random or gives up `exact`.
    """
    require_exact(variant, inputs)
    return defined_and_bound(variant, inputs, what, **view)


def defined_and_bound(
    variant: Any, inputs: Inputs, what: str = "out", *, visible: Tensor | None = None, rows: Sequence[int] | None = None
) -> tuple[Tensor, Bound]:
    """`exact_and_bound` whether or not the variant claims `exact`."""
    visible = inputs.visible(rows) if visible is None else visible
    # Values are averaged for out; weights lie in [0, 1]; lse moves with the scores, of which it is a maximum.
    return measured(
        inputs.case,
        lambda dtype: define(variant, inputs, dtype=dtype, visible=visible, rows=rows)[what],
        largest(inputs.value) if what == "out" else 1.0,
    )


def exact_gradients_and_bounds(
    variant: Any, inputs: Inputs, direction: Tensor, rows: Sequence[int] | None = None
) -> dict[str, tuple[Tensor, Bound]]:
    """The definition's gradients of sum(out * direction) by name, and their bounds; `direction` is 0 outside of `rows`."""
    visible = inputs.visible(rows)
    return measured_gradients(
        inputs.case,
        lambda dtype: defined_gradients(variant, inputs, direction, dtype, visible, rows),
        largest(direction) * largest(inputs.value),
    )
