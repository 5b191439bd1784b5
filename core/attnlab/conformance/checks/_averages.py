"""Conditions of laws about averages: out is weights times value, and no null slot takes weight. Needs torch.

A variant may be normalised (its weights sum to 1) and still project values, or add embeddings to them: its weights cannot be
read off its output, and equal values do not come through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.inputs import Inputs, define, reduction_terms
from attnlab.conformance.running.check import NotApplicable


def mixed(weights: Tensor, inputs: Inputs) -> Tensor:
    """weights @ value in float64, each query head with its own values."""
    group = weights.shape[1] // inputs.value.shape[1]
    return weights.double() @ inputs.value.double().repeat_interleave(group, dim=1)


def require_average(variant: Any, inputs: Inputs) -> None:
    """`NotApplicable` where the definition's out is not its weights times value; without a definition, the variant's own."""
    with torch.no_grad():
        try:
            answer = define(variant, inputs)
            out, weights = answer["out"], answer.get("weights")
            limit = 1e-6 * largest(inputs.value)
        except NotApplicable:
            if not variant.capabilities.weights:
                return
            out, weights, *_ = inputs.run(variant, need_weights=True)
            terms = reduction_terms(inputs.case)
            limit = rounding_bound(inputs.case.dtype, terms=terms, magnitude=largest(inputs.value)).limit
    if weights is not None and largest(out - mixed(weights, inputs)) > limit:
        raise NotApplicable("its formula's out is not its weights times value (it projects values, or adds to them)")


def no_null_slot(variant: Any) -> None:
    """`NotApplicable` where a slot without a value takes part of the weight."""
    if variant.capabilities.null_key:
        raise NotApplicable("it declares null_key: a slot without a value takes part of the weight")


def require_linear(variant: Any, inputs: Inputs) -> None:
    """`NotApplicable` where out is not linear in value, by claim and by definition: a null slot may carry a value of its own."""
    if variant.capabilities.linear_in_value:
        return
    with torch.no_grad():
        once, twice = (
            define(variant, inputs.with_tensors(value=n * inputs.value))["out"].to(torch.float64) for n in (1, 2)
        )
    if largest(twice - 2 * once) > 1e-6 * largest(twice):
        raise NotApplicable("out is not linear in value, so dropped weights cannot be read off it")
