"""Variants that are random or only approximate their formula: what can still be compared. Needs torch.

Calls of other shapes draw other numbers: a `Check` that compares those leaves `random_too` unset and is not applicable to
random variants. A definition without random numbers gives the mean, so `require_exact` excludes single calls. Whether a
variant is random is found by trying two seeds; a variant that claims `deterministic` is held to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.inputs import Inputs, define, draw, reduction_terms, require_served
from attnlab.conformance.oracle.seeds import draws_freely, seeded_draws
from attnlab.conformance.running.check import NotApplicable


def is_random(variant: Any, inputs: Inputs) -> bool:
    """Whether seeds change the output by more than rounding, where the variant does not claim `deterministic`.

    Tried on these inputs and on plain ones: with large scores two draws may agree by chance.
    """
    return draws_freely(variant) and (
        _varies(variant, inputs) or _varies(variant, draw(_plain(inputs, inputs.case.seed), variant))
    )


def require_exact(variant: Any, inputs: Inputs) -> None:
    """`NotApplicable` where the variant says that one call may differ from the definition by more than rounding.

    `UnsupportedRequest` where it refuses the call, before its definition meets sizes that it cannot take.
    """
    require_served(variant, inputs)
    have = variant.capabilities
    if have.exact:
        return
    if have.approximation is not None:
        raise NotApplicable(f"it approximates its formula, within {have.approximation} of the largest value")
    if have.notes.get("exact"):
        raise NotApplicable(f"it gives up `exact`: {have.notes['exact']}")
    if is_random(variant, inputs):
        raise NotApplicable("it is random by design: its mean is compared with the definition, no single call")
    if _differs_plainly(variant, inputs):
        raise NotApplicable(
            "it does not claim `exact`, states no reason, and a plain call differs from its definition: see agrees_with_definition"
        )


def gives_up_exact_silently(variant: Any) -> bool:
    """Whether it does not claim `exact` and no note says why."""
    have = variant.capabilities
    return not have.exact and have.approximation is None and not have.notes.get("exact")


def _plain(inputs: Inputs, seed: int) -> Any:
    sizes: dict[str, Any] = {"batch": 2, "query_length": 7, "key_length": 7}
    return replace(inputs.case, features=(), needs=(), note="", seed=seed, **sizes)


def _varies(variant: Any, inputs: Inputs) -> bool:
    with torch.no_grad():
        first, second = (_once(variant, inputs, seed) for seed in (11, 12))
    return bool((first - second).abs().nan_to_num(0).gt(_rounding(inputs, first)).any())


def _once(variant: Any, inputs: Inputs, seed: int) -> Tensor:
    """Out of one call with that seed."""
    with seeded_draws(seed, inputs.case.device):
        out: Tensor = variant(inputs.query, inputs.key, inputs.value, **inputs.arguments).out
    return out


def _differs_plainly(variant: Any, inputs: Inputs) -> bool:
    """Whether even a plain call differs from the definition, so that other calls tell nothing more."""
    plain = draw(_plain(inputs, 0), variant)
    low = torch.float32 if plain.query.dtype == torch.float64 else plain.query.dtype
    with torch.no_grad():
        exact = define(variant, plain)["out"]
        error = largest(define(variant, plain, dtype=low)["out"] - exact)
        got = _once(variant, plain, plain.case.seed)
    limit = 2 * error + _rounding(plain, exact)
    return not bool(got.isfinite().all()) or largest(got - exact) > limit


def _rounding(inputs: Inputs, out: Tensor) -> float:
    size = max(largest(out), largest(inputs.value))
    return rounding_bound(inputs.case.dtype, terms=reduction_terms(inputs.case), magnitude=size).limit
