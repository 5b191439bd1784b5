"""Variants that draw random numbers or only approximate their formula: what still can be compared. Needs torch.

A variant that does not claim `deterministic` is called with one seed each time (`seeded_draws`), so that two calls of one
shape draw the same numbers and may be compared. Calls of other shapes draw others: a `Check` that compares those leaves
`random_too` unset and passes random variants by. A definition without random numbers says what the mean is, and
`require_exact` passes single calls by. Whether a variant is random is found out by trying two seeds: what claims
`deterministic` is held to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.running.check import NotApplicable
from attnlab.errors import UnsupportedRequest
from attnlab.request import Request

if TYPE_CHECKING:
    from attnlab.conformance.oracle.inputs import Inputs


@contextmanager
def seeded_draws(seed: int, device: str) -> Iterator[None]:
    """Random numbers inside start from `seed`; the caller's generators are left as they were."""
    where = torch.device(device)
    if where.type in ("cpu", "meta"):
        fork = torch.random.fork_rng(devices=[])
    else:
        fork = torch.random.fork_rng(devices=[where.index or 0], device_type=where.type)
    with fork:
        reseed(seed, device)
        yield


def reseed(seed: int, device: str) -> None:
    """Start the generator of `device` from `seed`.

    `torch.manual_seed` also queues the seed for every accelerator that is not up yet, with a stack trace each: 1 ms.
    """
    if torch.device(device).type in ("cpu", "meta"):
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def draws_freely(variant: Any) -> bool:
    """Whether nothing promises that two calls give the same bits."""
    have = getattr(variant, "capabilities", None)
    return have is not None and not have.deterministic


def is_random(variant: Any, inputs: Inputs) -> bool:
    """Whether seeds change the output by more than rounding, where the variant does not claim `deterministic`.

    Tried on these inputs, and on plain ones: large scores may leave nothing to chance in two draws, and something in the third.
    """
    from attnlab.conformance.oracle.inputs import draw

    if not draws_freely(variant):
        return False
    plain = replace(inputs.case, features=(), needs=(), note="", batch=2, query_length=7, key_length=7)
    return _varies(variant, inputs) or _varies(variant, draw(plain, variant))


def _varies(variant: Any, inputs: Inputs) -> bool:
    with torch.no_grad():
        first, second = (once(variant, inputs, seed) for seed in (11, 12))
    size = max(largest(first), largest(inputs.value))
    limit = rounding_bound(inputs.case.dtype, terms=_terms(inputs), magnitude=size).limit
    return bool((first - second).abs().nan_to_num(0).gt(limit).any())


def once(variant: Any, inputs: Inputs, seed: int) -> Tensor:
    """Out of one call with that seed."""
    with seeded_draws(seed, inputs.case.device):
        out: Tensor = variant(inputs.query, inputs.key, inputs.value, **inputs.arguments).out
    return out


def require_exact(variant: Any, inputs: Inputs) -> None:
    """`NotApplicable` where one call may differ from the definition by more than rounding, as the variant says of itself.

    What it refuses is refused here, before its definition meets sizes that were never meant for it.
    """
    require_served(variant, inputs)
    have = variant.capabilities
    if have.exact:
        return
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
    return not have.exact and not have.notes.get("exact")


def _differs_plainly(variant: Any, inputs: Inputs) -> bool:
    """Whether even a plain call is not what the definition says, so that nothing more is to be learned from other calls."""
    from attnlab.conformance.oracle.inputs import define, draw

    case = replace(inputs.case, features=(), needs=(), note="", batch=2, query_length=7, key_length=7, seed=0)
    plain = draw(case, variant)
    low = torch.float32 if plain.query.dtype == torch.float64 else plain.query.dtype
    with torch.no_grad():
        exact = define(variant, plain)["out"]
        error = largest(define(variant, plain, dtype=low)["out"] - exact)
        got = once(variant, plain, case.seed)
    size = max(largest(exact), largest(plain.value))
    limit = 2 * error + rounding_bound(case.dtype, terms=_terms(plain), magnitude=size).limit
    return not bool(got.isfinite().all()) or largest(got - exact) > limit


def require_served(variant: Any, inputs: Inputs) -> None:
    """`UnsupportedRequest` where the variant's own `supports` refuses this call."""
    from attnlab.interface import Attention

    if not isinstance(variant, Attention) or type(variant).supports is Attention.supports:
        return
    (batch, heads, queries, query_dim), (_, kv_heads, keys, key_dim) = inputs.query.shape, inputs.key.shape
    given = {n for n, x in inputs.arguments.items() if x is not None and x is not False}
    asked = {"key_mask" if n == "key_lengths" else n for n in given} & set(ASKABLE)
    request = Request.of(
        *asked,
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        query_length=queries,
        key_length=keys,
        head_dim=query_dim,
        key_dim=key_dim,
        value_dim=inputs.value.shape[3],
        dtype=inputs.case.dtype,
        device=inputs.query.device.type,
    )
    reasons = variant.supports(request)
    if reasons:
        raise UnsupportedRequest(f"{variant.name} does not support " + "; ".join(map(str, reasons)), reasons)


def require_steady(variant: Any, inputs: Inputs) -> None:
    """`NotApplicable` for random variants, inside a check that compares calls of different shapes or orders."""
    if is_random(variant, inputs):
        raise NotApplicable("it is random by design: a call of another shape or order draws other numbers")


def _terms(inputs: Inputs) -> int:
    from attnlab.conformance.oracle.inputs import reduction_terms

    return reduction_terms(inputs.case)
