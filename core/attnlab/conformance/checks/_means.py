"""Random variants against their definition: the mean over seeds is judged, no single call. Needs torch; used by values."""

from __future__ import annotations

from typing import Any

import torch

from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.inputs import Inputs, define, reduction_terms
from attnlab.conformance.running.check import NotApplicable

DRAWS = 250
"""Enough to see a mean that is 5% too large, in less than a tenth of a second."""
SIGMAS = 6.0
"""A correct variant misses a 6 sigma bound twice in 10^9 draws, and the draws are seeded."""
FEATURES = ((), ("causal",), ("mask",), ("key_mask_left",), ("bias",), ("scale",), ("gqa",), ("window",))
ADVICE = (
    "A random variant's definition is its mean. Where another is meant, let the definition draw the same numbers from "
    "torch's default generator and claim `exact`"
)


def demand_right_mean(variant: Any, inputs: Inputs) -> None:
    """Fail unless the mean of out over seeds is the definition's, element by element and along the definition's answer."""
    case = inputs.case
    if case.features not in FEATURES or case.query_length > 16:
        raise NotApplicable("it is random by design: its mean is judged on a few small cases")
    with torch.no_grad(), seeded_draws(case.seed + 100, case.device):  # one seed: further calls draw further numbers
        exact = define(variant, inputs)["out"]
        drawn = [variant(inputs.query, inputs.key, inputs.value, **inputs.arguments).out for _ in range(DRAWS)]
    outs = torch.stack(drawn).to(torch.float64)
    # The mean of n draws of spread s misses by 6 s / sqrt(n) at most. A key that is rarely drawn may show no spread in n
    # draws, so each element is given the largest spread that any has.
    rounding = rounding_bound(
        case.dtype, terms=reduction_terms(case), magnitude=max(largest(exact), largest(inputs.value))
    ).limit
    along = (outs * exact).sum(dim=(1, 2, 3, 4))  # [draws]
    origin = f"{SIGMAS:.0f} sigma of the mean of {DRAWS} draws"
    for what, mean, wanted, spread, more in (
        ("the mean of out", outs.mean(dim=0), exact, float(outs.std(dim=0).max()), rounding),
        (
            "<the mean of out, the definition's out>",
            along.mean().reshape(1),
            exact.square().sum().reshape(1),
            float(along.std()),
            rounding * float(exact.abs().sum()),
        ),
    ):
        limit = Bound(SIGMAS * spread / DRAWS**0.5 + more, origin)
        demand_close(mean, wanted, limit, variant, case, what=what, versus="the float64 definition's", advice=ADVICE)
