"""Dropout: seeded, unbiased, on the weights, the same mask backward. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import require_average
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks._stepping import NEEDS, feed, step
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.draws import require_exact, seeded_draws
from attnlab.conformance.oracle.inputs import Inputs, define, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope

ADVICE_STATE = "A step drops like any other call: past and new keys alike"
SIGMAS = 6.0
"""A correct variant misses a 6 sigma bound twice in 10^9 draws, and the draws are seeded."""


def check_dropout_drops_that_share(variant: Any, case: Case) -> None:
    """A share p of the weights is dropped; the kept ones are divided by 1 - p."""
    require_linear(variant, draw(case, variant))
    inputs, weights = _identity_values(variant, case)
    require_exact(variant, inputs)
    alike = inputs.with_tensors(value=draw(case, variant).value[..., :1].expand(inputs.value.shape).clone())
    columns = _seeded(variant, alike, 1, dropout_p=0.5)
    demand_close(
        columns,
        columns[..., :1].expand(columns.shape),
        rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=2 * largest(alike.value)),
        variant,
        case,
        what="out",
        versus="its first column, where all columns of value are one (dropout_p = 0.5)",
        advice="Dropout acts on weights, so that all of a value is dropped or none of it: not on out",
    )
    for p in (0.1, 0.5, 0.9):
        seen = _seeded(variant, inputs, 1, dropout_p=p).to(torch.float64)  # the weights after dropout
        counted = weights > 1e-3
        kept = (seen != 0) & counted
        limit = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=1 / (1 - p))
        demand_close(
            seen,
            torch.where(kept, weights / (1 - p), torch.where(counted, 0.0, seen)),
            limit,
            variant,
            case,
            what="weights after dropout",
            versus=f"weight / (1 - p) where kept, 0 where dropped (p = {p})",
            advice="Dropout acts on the normalised weights and divides the kept ones by 1 - p",
        )
        n = int(counted.sum())
        if not n:
            raise NotApplicable("its formula gives no weight here that could be dropped")
        share = 1 - int(kept.sum()) / n
        bound = SIGMAS * (p * (1 - p) / n) ** 0.5
        demand(
            abs(share - p) <= bound,
            variant,
            case,
            f"dropout_p = {p} dropped a share of {share:.4f} of {n} weights, bound {p} +- {bound:.4f} "
            f"({SIGMAS:.0f} sigma of a binomial)",
            "Drop each weight with probability p, independently",
        )


def check_dropout_is_seeded(variant: Any, case: Case) -> None:
    """The same seed gives the same bits, another seed others, and p = 0 is no dropout at all."""
    inputs = draw(case, variant)
    first, again, other = (_seeded(variant, inputs, seed, dropout_p=0.5) for seed in (1, 1, 2))
    demand(
        bool(torch.equal(first, again)),
        variant,
        case,
        "the same seed gives two outputs with dropout_p = 0.5",
        "Draw from torch's default generator of the device only",
    )
    demand(
        not bool(torch.equal(first, other)),
        variant,
        case,
        "two seeds give one output with dropout_p = 0.5",
        "dropout_p is ignored, or the mask is fixed",
    )
    with torch.no_grad():
        plain = inputs.run(variant).out
        none = inputs.run(variant, dropout_p=0.0).out
    demand(bool(torch.equal(plain, none)), variant, case, "dropout_p = 0 changes the output", "0 means no dropout")


def check_dropout_backward_uses_the_forward_mask(variant: Any, case: Case) -> None:
    """Out is linear in value for one mask, so <grad_value, value> must equal <grad_out, out>."""
    inputs = draw(case, variant)
    require_linear(variant, inputs)
    direction = direction_for(inputs)
    with seeded_draws(3, case.device):
        out, found = gradients(variant, inputs, direction, dropout_p=0.4)
    left = (found["value"].to(torch.float64) * inputs.value).sum()
    right = (direction.to(torch.float64) * out).sum()
    size = largest(direction) * largest(inputs.value) * out.numel()
    limit: Bound = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size)
    demand_close(
        left.reshape(1),
        right.reshape(1),
        limit,
        variant,
        case,
        what="<gradient of value, value>",
        versus="<grad_out, out>, which it equals when both use one mask",
        advice="A backward that recomputes must restore the generator's state of the forward",
    )


def check_dropout_reaches_past_and_new_keys(variant: Any, case: Case) -> None:
    """With a state a share p of the weights is dropped too, of past keys and of new ones, and the kept are divided by 1 - p."""
    require_linear(variant, draw(case, variant))
    inputs, weights = _identity_values(variant, case)
    require_exact(variant, inputs)
    past, p = case.key_length // 2, 0.5
    with torch.no_grad(), seeded_draws(1, case.device):
        _, state = feed(variant, inputs, [past])
        seen = step(variant, inputs, past, case.query_length, state, dropout_p=p).out.double()
    weights = weights[:, :, past:]
    counted = weights > 1e-3
    kept = (seen != 0) & counted
    demand_close(
        seen,
        torch.where(kept, weights / (1 - p), torch.where(counted, 0.0, seen)),
        rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=1 / (1 - p)),
        variant,
        case,
        what="weights after dropout",
        versus=f"weight / (1 - p) where kept, 0 where dropped (p = {p}, after {past} tokens)",
        advice=ADVICE_STATE,
    )
    for word, columns in (("past", slice(0, past)), ("new", slice(past, None))):
        n = int(counted[..., columns].sum())
        if not n:  # a window of the formula's own may hide all of the past
            continue
        share = 1 - int(kept[..., columns].sum()) / n
        bound = SIGMAS * (p * (1 - p) / n) ** 0.5
        demand(
            abs(share - p) <= bound,
            variant,
            case,
            f"dropout_p = {p} dropped a share of {share:.4f} of {n} weights of {word} keys, bound {p} +- {bound:.4f} "
            f"({SIGMAS:.0f} sigma of a binomial)",
            ADVICE_STATE,
        )


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


def _identity_values(variant: Any, case: Case) -> tuple[Inputs, Tensor]:
    """Values that are the unit vectors, so that out is the weights; and the definition's weights.

    `NotApplicable` where out is something else than weights times value.
    """
    inputs = draw(case, variant)
    eye = torch.eye(case.key_length, case.value_dim, dtype=inputs.value.dtype, device=inputs.value.device)
    inputs = inputs.with_tensors(value=eye.expand_as(inputs.value).clone())
    require_average(variant, inputs)
    with torch.no_grad():
        return inputs, define(variant, inputs)["out"]


def _seeded(variant: Any, inputs: Inputs, seed: int, **more: Any) -> Tensor:
    with seeded_draws(seed, inputs.case.device), torch.no_grad():
        out: Tensor = inputs.run(variant, **more).out
    return out


def _statistics(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"needs": ("dropout",), "dtype": scope.base, "batch": 6, "num_heads": 4, "num_kv_heads": 4}
    for labels in ((), ("causal",)):
        yield case(*labels, **sizes, query_length=24, key_length=8)
        yield case(*labels, **sizes, query_length=8, key_length=8)
    for dtype in (d for d in scope.dtypes if d != scope.base):
        yield case(**{**sizes, "dtype": dtype}, query_length=8, key_length=8)
    for more in (("bias", "scale"), ("softcap", "sinks", "key_mask_holes"), ("mask", "score_mod")):
        yield case(*declared(scope, *more), **sizes, query_length=8, key_length=8)
    if not scope.quick:
        yield case(*declared(scope, "window", "bias_per_key"), **sizes, query_length=8, key_length=8)
        grouped = {**sizes, "num_kv_heads": 2, "query_length": 8, "key_length": 8}
        yield case(*declared(scope, "segments", "softcap"), **grouped)


def _through_a_state(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"dtype": scope.base, "batch": 6, "query_length": 8, "key_length": 8}
    yield case("causal", needs=(*NEEDS, "dropout"), num_heads=4, num_kv_heads=4, **sizes)


def _cases(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("gqa",)):
        yield case(*labels, needs=("dropout",), dtype=scope.base)


def _backward(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("gqa",)):
        yield case(*labels, needs=("dropout", "backward"), dtype=scope.base)
    yield case("causal", needs=("dropout", "backward"), dtype=scope.base, query_length=70, key_length=70)


CHECKS = (
    Check(check_dropout_drops_that_share, "dropout", _statistics),
    Check(check_dropout_reaches_past_and_new_keys, "dropout", _through_a_state),
    Check(check_dropout_is_seeded, "dropout", _cases, random_too=True),
    Check(check_dropout_backward_uses_the_forward_mask, "dropout", _backward, random_too=True),
)
