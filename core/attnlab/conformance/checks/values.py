"""The output against the definition; of random variants the mean over seeds. Needs torch."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.compare.advice import about, of_precision
from attnlab.conformance.compare.comparer import DEFINITION, Comparer, drawn
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.bounds import defined_and_bound, exact_and_bound_of_draws
from attnlab.conformance.oracle.cases import Case, case, in_dtypes, pairs, singles
from attnlab.conformance.oracle.draws import gives_up_exact_silently, is_random
from attnlab.conformance.oracle.features import FEATURES, compatible
from attnlab.conformance.oracle.inputs import define, draw, reduction_terms
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, NotApplicable, Scope

QUICK_PAIRS = 23
"""A prime stride through the list of pairs: every label occurs, no two runs differ."""
DRAWS = 250
"""Enough to find a mean that is 5% too large, in less than a tenth of a second."""
SIGMAS = 6.0
"""A correct variant misses a 6 sigma bound twice in 10^9 draws, and the draws are seeded."""
MEANS = ((), ("causal",), ("mask",), ("key_mask_left",), ("bias",), ("scale",), ("gqa",), ("window",))
"""Features with which a mean is compared."""
MEAN_ADVICE = (
    "A random variant's definition is its mean. Where another is meant, let the definition draw the same numbers from "
    "torch's default generator and claim `exact`"
)


GIVE_A_REASON = (
    "It does not claim `exact`. Where it approximates its formula by design, say so with a reason, which turns comparisons with the "
    "definition off: `capabilities = replace(..., exact=False, notes={'exact': 'random features approximate softmax'})`"
)


def check_agrees_with_definition(variant: Any, case: Case) -> None:
    """Out equals the float64 definition within the derived bound; a random variant's does so in the mean."""
    inputs, compare = drawn(case, variant)
    if not variant.capabilities.exact and is_random(variant, inputs):
        _demand_right_mean(compare)
    elif gives_up_exact_silently(variant) and not case.features:
        got = inputs.out(variant)
        compare.close(got, *defined_and_bound(variant, inputs), DEFINITION, GIVE_A_REASON, inputs=inputs)
    else:
        compare.defined(inputs.out(variant), about(variant, case))


def _demand_right_mean(compare: Comparer) -> None:
    """Fail unless the mean of out over seeds is the definition's, element by element and along the definition's answer."""
    variant, case, inputs = compare.variant, compare.case, compare.inputs
    if case.features not in MEANS or case.query_length > 16:
        raise NotApplicable("it is random by design: its mean is judged on a few small cases")
    with torch.no_grad(), seeded_draws(case.seed + 100, case.device):  # one seed: further calls draw further numbers
        exact = define(variant, inputs)["out"]
        draws = [variant(inputs.query, inputs.key, inputs.value, **inputs.arguments).out for _ in range(DRAWS)]
    outs = torch.stack(draws).to(torch.float64)
    # The mean of n draws of spread s misses by 6 s / sqrt(n) at most. A key that is rarely drawn may show no spread in n
    # draws, so each element is allowed the largest spread that any has.
    size = max(largest(exact), largest(inputs.value))
    rounding = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size).limit
    along = (outs * exact).sum(dim=(1, 2, 3, 4))  # [draws]
    size_along, mean_along = exact.square().sum().reshape(1), along.mean().reshape(1)
    for what, mean, expected, spread, more in (
        ("the mean of out", outs.mean(dim=0), exact, float(outs.std(dim=0).max()), 1.0),
        (
            "<the mean of out, the definition's out>",
            *(mean_along, size_along, float(along.std()), float(exact.abs().sum())),
        ),
    ):
        limit = Bound(
            SIGMAS * spread / DRAWS**0.5 + rounding * more, f"{SIGMAS:.0f} sigma of the mean of {DRAWS} draws"
        )
        compare.close(mean, expected, limit, "the float64 definition's", MEAN_ADVICE, what=what)


def check_large_scores_do_not_overflow(variant: Any, case: Case) -> None:
    """Queries 30 times as large, in float64 300 times: scores past the range of exp neither overflow nor lose the sum."""
    wide = case.dtype == "float64" and variant.family in ("score", "plain")  # exp ends at 709 there, at 88 in float32
    draws = [draw(replace(case, seed=case.seed + n), variant) for n in (0, 31, 32)]
    draws = [one.with_tensors(query=one.query * (300 if wide else 30)) for one in draws]
    advice = (
        "Subtract the row's maximum before exp (or divide numerator and normaliser by a common factor), "
        "and take sums in float32 or better"
    )
    compare = Comparer(variant, draws[0])
    exact, limit = exact_and_bound_of_draws(variant, draws)
    advising = of_precision(variant, case, advice)
    compare.close(draws[0].out(variant), exact, limit, DEFINITION, advising, inputs=draws[0])


def _agreement(scope: Scope) -> Iterable[Case]:
    base = scope.base
    yield from singles(dtype=base)
    for labels in ("", "causal", "key_mask_left"):
        yield from (c for d in scope.other_dtypes for c in scope.cases(labels, dtype=d))
    yield from (c for d in scope.dtypes for c in scope.cases("gqa+longer_keys", dtype=d))
    possible = [c for c in pairs(dtype=base) if not c.missing(scope.capabilities)]
    if scope.quick:
        yield from possible[:: max(1, len(possible) // QUICK_PAIRS)]
    else:
        yield from possible
        yield from in_dtypes((c for c in singles() if c.features), scope.other_dtypes)
    # Past the tiles and chunks of usual kernels, at lengths that divide none of them.
    long: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "seed": 3}
    for length in (137,) if scope.quick else (137, 66):
        alone = ("", "causal", "window", "key_mask_holes", "mask")
        yield from scope.cases(*alone, **long, query_length=length, key_length=length)
        yield from scope.cases("causal", **long, query_length=61, key_length=length)
    combined = (
        "causal+key_mask_holes+bias_per_key",
        "sinks+softcap+bias",
        "causal+mask+score_mod",
        "segments+mask_mod",
    )
    yield from scope.usable(*combined, **long, query_length=137, key_length=137)
    yield from scope.usable("bias+mask_per_head+gqa", needs=("gqa",), num_heads=6, num_kv_heads=3)
    # Several items and heads, whose rows lie past a partial tile of the ones before.
    yield from scope.usable("causal+gqa", query_length=131, key_length=131)
    if not scope.quick:
        yield from scope.cases("window+key_mask_holes", query_length=193, key_length=193)
        yield from scope.cases("offset_window+value_dim", query_length=130, key_length=259)
        yield from scope.usable("window+bias+sinks", query_length=67, key_length=131)
        yield from scope.usable("key_lengths+mask_per_head", query_length=131, key_length=70)
    yield from _decoding(scope)
    yield from together(scope, 6 if scope.quick else 60)


def _decoding(scope: Scope) -> Iterable[Case]:
    """Few queries over many keys, and the reverse; in the precise dtype, so that one key among many shows."""
    keys, many = (150, 1200) if scope.stepwise else (600, 4500)
    few: dict[str, Any] = {"batch": 1, "dtype": scope.precise, "query_length": 3, "key_length": keys}
    needs = ("cross_lengths",)
    yield from scope.usable("bottom_right", "left_window", "key_mask_holes+bias", **few, needs=needs)
    yield from scope.usable("bottom_right+gqa", **{**few, "query_length": 300, "key_length": 5})
    square = {"batch": 1, "query_length": 260, "key_length": 260, "num_heads": 1, "num_kv_heads": 1}
    yield from scope.usable("causal", **square)
    yield from scope.usable("bottom_right", **{**few, "dtype": scope.base})
    if not scope.quick:
        yield from scope.usable("bottom_right", **{**few, "key_length": many}, needs=needs)


HIDING = frozenset({"causal", "window", "key_mask", "key_lengths", "query_lengths", "segments", "mask", "mask_mod"})


def together(scope: Scope, count: int) -> Iterable[Case]:
    """Calls that use four to nine declared features at once, at most three of them hiding something, drawn for each seed."""
    possible = list(scope.declared(*FEATURES))
    for seed in range(count):
        chosen: list[str] = []
        hiding = 0
        for label in random.Random(seed).sample(possible, len(possible)):
            hides = bool(HIDING & set(FEATURES[label].sets))
            if len(chosen) < 4 + seed % 6 and hiding + hides <= 3 and compatible(*chosen, label):
                chosen.append(label)
                hiding += hides
        yield case(*sorted(chosen, key=possible.index), dtype=scope.base, seed=seed)


def _large(scope: Scope) -> Iterable[Case]:
    cases = scope.cases("", "causal", "mask", "key_mask_right", note="30x queries")
    return in_dtypes(cases, scope.dtypes if not scope.quick else scope.dtypes[-2:])


CHECKS = (
    Check(check_agrees_with_definition, "values", _agreement, random_too=True),
    Check(check_large_scores_do_not_overflow, "values", _large, random_too=True),
)
