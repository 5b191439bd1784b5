"""The output against the definition. Needs torch; run by `run_checks`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._means import demand_right_mean
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.compare.advice import about, of_precision
from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import Bound
from attnlab.conformance.oracle.cases import Case, case, in_dtypes, pairs, singles
from attnlab.conformance.oracle.conditioning import exact_and_bound_of_draws
from attnlab.conformance.oracle.draws import gives_up_exact_silently, is_random
from attnlab.conformance.oracle.features import FEATURES, compatible
from attnlab.conformance.oracle.inputs import Inputs, defined_and_bound, draw, exact_and_bound
from attnlab.conformance.running.check import Check, Scope

QUICK_PAIRS = 23  # a prime stride through the list of pairs: every label is met, no two runs differ


GIVE_A_REASON = (
    "It does not claim `exact`. Where it approximates its formula by design, say so with a reason, which turns comparisons with the "
    "definition off: `capabilities = replace(..., exact=False, notes={'exact': 'random features approximate softmax'})`"
)


def check_agrees_with_definition(variant: Any, case: Case) -> None:
    """Out equals the float64 definition within the derived bound; a random variant's does so in the mean."""
    inputs = draw(case, variant)
    if not variant.capabilities.exact and is_random(variant, inputs):
        demand_right_mean(variant, inputs)
    elif gives_up_exact_silently(variant) and not case.features:
        _compare(variant, inputs, GIVE_A_REASON, defined_and_bound(variant, inputs))
    else:
        _compare(variant, inputs, about(variant, case))


def check_survives_large_scores(variant: Any, case: Case) -> None:
    """Queries 30 times as large, in float64 300 times: scores past the range of exp neither overflow nor lose the sum."""
    draws = [draw(replace(case, seed=case.seed + n), variant) for n in (0, 31, 32)]
    wide = case.dtype == "float64" and variant.family in ("score", "plain")  # exp ends at 709 there, at 88 in float32
    draws = [one.with_tensors(query=one.query * (300 if wide else 30)) for one in draws]
    _compare(
        variant,
        draws[0],
        of_precision(
            variant,
            case,
            "Subtract the row's maximum before exp (or divide numerator and normaliser by a common factor), "
            "and take sums in float32 or better",
        ),
        exact_and_bound_of_draws(variant, draws),
    )


def _compare(
    variant: Any, inputs: Inputs, advice: str | Callable[[], str], judged: tuple[torch.Tensor, Bound] | None = None
) -> None:
    with torch.no_grad():
        got = inputs.run(variant).out
    exact, limit = judged or exact_and_bound(variant, inputs)
    demand_close(
        got,
        exact,
        limit,
        variant,
        inputs.case,
        what="out",
        versus="the float64 definition",
        advice=advice,
        inputs=inputs,
    )


def _agreement(scope: Scope) -> Iterable[Case]:
    base = scope.base
    yield from singles(dtype=base)
    for labels in ((), ("causal",), ("key_mask_left",), ("gqa", "longer_keys")):
        for dtype in scope.dtypes:
            if labels == ("gqa", "longer_keys") or dtype != base:
                yield case(*labels, dtype=dtype)
    possible = [c for c in pairs(dtype=base) if not c.missing(scope.capabilities)]
    if scope.quick:
        yield from possible[:: max(1, len(possible) // QUICK_PAIRS)]
    else:
        yield from possible
        yield from in_dtypes((c for c in singles() if c.features), (d for d in scope.dtypes if d != base))
    # Past the tiles and chunks of usual kernels, at lengths that divide none of them.
    long: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "dtype": base, "seed": 3}
    sizes = (137,) if scope.quick else (137, 66)
    for length in sizes:
        for labels in ((), ("causal",), ("window",), ("key_mask_holes",), ("mask",)):
            yield case(*labels, **long, query_length=length, key_length=length)
        yield case("causal", **long, query_length=61, key_length=length)
    for combined in (
        ("causal", "key_mask_holes", "bias_per_key"),
        ("sinks", "softcap", "bias"),
        ("causal", "mask", "score_mod"),
        ("segments", "mask_mod"),
    ):
        yield case(*declared(scope, *combined), **long, query_length=137, key_length=137)
    groups = {"dtype": base, "num_heads": 6, "num_kv_heads": 3}
    yield case(*declared(scope, "bias", "mask_per_head", "gqa"), needs=("gqa",), **groups)
    # Several items and heads, whose rows lie past a partial tile of the ones before.
    yield case(*declared(scope, "causal", "gqa"), dtype=base, query_length=131, key_length=131)
    if not scope.quick:
        yield case("window", "key_mask_holes", dtype=base, query_length=193, key_length=193)
        yield case("offset_window", "value_dim", dtype=base, query_length=130, key_length=259)
        yield case(*declared(scope, "window", "bias", "sinks"), dtype=base, query_length=67, key_length=131)
        yield case(*declared(scope, "key_lengths", "mask_per_head"), dtype=base, query_length=131, key_length=70)
    yield from _decoding(scope)
    yield from together(scope, 6 if scope.quick else 60)


def _decoding(scope: Scope) -> Iterable[Case]:
    """Few queries over many keys, and the reverse; in the precise dtype, so that one key among many is seen."""
    few = {"batch": 1, "dtype": scope.precise, "query_length": 3, "key_length": 150 if scope.stepwise else 600}
    for labels in (("bottom_right",), ("left_window",), ("key_mask_holes", "bias")):
        yield case(*declared(scope, *labels), **few, needs=("cross_lengths",))
    yield case(*declared(scope, "bottom_right", "gqa"), **{**few, "query_length": 300, "key_length": 5})
    yield case(
        *declared(scope, "causal"),
        **{**few, "dtype": scope.base, "query_length": 260, "key_length": 260, "num_heads": 1, "num_kv_heads": 1},
    )
    yield case(*declared(scope, "bottom_right"), **{**few, "dtype": scope.base})
    if not scope.quick:
        many = 1200 if scope.stepwise else 4500
        yield case(*declared(scope, "bottom_right"), **{**few, "key_length": many}, needs=("cross_lengths",))


HIDING = frozenset({"causal", "window", "key_mask", "key_lengths", "query_lengths", "segments", "mask", "mask_mod"})


def together(scope: Scope, count: int) -> Iterable[Case]:
    """Calls that use four to nine declared features at once, at most three of them hiding something, drawn for each seed."""
    have = scope.capabilities
    possible = [label for label, one in FEATURES.items() if all(have.declares(n) for n in one.askables)]
    for seed in range(count):
        order = random.Random(seed).sample(possible, len(possible))
        chosen: list[str] = []
        hiding = 0
        for label in order:
            hides = bool(HIDING & set(FEATURES[label].sets))
            if len(chosen) < 4 + seed % 6 and hiding + hides <= 3 and compatible(*chosen, label):
                chosen.append(label)
                hiding += hides
        yield case(*sorted(chosen, key=possible.index), dtype=scope.base, seed=seed)


def _large(scope: Scope) -> Iterable[Case]:
    cases = [case(), case("causal"), case("mask"), case("key_mask_right")]
    dtypes = scope.dtypes if not scope.quick else scope.dtypes[-2:]
    return in_dtypes((replace(c, note="30x queries") for c in cases), dtypes)


CHECKS = (
    Check(check_agrees_with_definition, "values", _agreement, random_too=True),
    Check(check_survives_large_scores, "values", _large, random_too=True),
)
