"""The bound for ill-conditioned contents: the plain formula's error as the largest of several draws. Needs torch.

Where scores are in the hundreds one rounding of a score moves the output as much as all other roundings together. The
error of one draw may then be luckily small, and another correct order of the same sums lie beyond twice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, bound, largest
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, plain_dtype, reduction_terms


def exact_and_bound_of_draws(variant: Any, draws: Sequence[Inputs]) -> tuple[Tensor, Bound]:
    """The float64 out of the first draw, and the bound whose plain error is the largest of all draws.

    `NotApplicable` for a variant that is random or gives up `exact`.
    """
    require_exact(variant, draws[0])
    low = plain_dtype(draws[0].case.dtype)
    exact, plain = [], []
    with torch.no_grad():
        for inputs in draws:
            visible = inputs.visible()
            exact.append(define(variant, inputs, visible=visible)["out"])
            plain.append(define(variant, inputs, dtype=getattr(torch, low), visible=visible)["out"])
    limit = bound(
        draws[0].case.dtype,
        exact=torch.cat(exact),
        plain=torch.cat(plain),
        plain_dtype=low,
        terms=reduction_terms(draws[0].case),
        magnitude=max(largest(inputs.value) for inputs in draws),
    )
    return exact[0], limit
