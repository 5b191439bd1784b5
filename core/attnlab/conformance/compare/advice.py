"""Advice on precision, where a check of half precision has failed. Needs torch.

Advice that names the wrong cause sends its reader astray: a fault of a mask that is met in half precision is no fault of
precision. So the same variant is called again, plainly or in a wider dtype, before a cause is named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.compare.tolerances import largest_error
from attnlab.conformance.oracle.bounds import defined_and_bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.inputs import draw


def of_precision(variant: Any, case: Case, advice: str) -> Callable[[], str]:
    """`advice` on precision or range, unless ordinary contents in a wide dtype differ from the definition too."""

    def told() -> str:
        wide = next((d for d in ("float32", "float64") if d in variant.capabilities.dtypes), None)
        if wide is None:
            return advice
        same = replace(case, dtype=wide, note="")
        if not _differs(copy.deepcopy(variant).to(getattr(torch, wide)), same):
            return advice
        return f"It is no matter of precision: the same call with ordinary contents in {wide} differs too, so look there first"

    return told


def _differs(variant: Any, case: Case) -> bool:
    try:
        inputs = draw(case, variant)
        with torch.no_grad():
            got = inputs.run(variant).out
        exact, limit = defined_and_bound(variant, inputs)
    except Exception:  # a broken variant may raise anything: then there is nothing to compare
        return False
    return largest_error(got, exact) > limit.limit
