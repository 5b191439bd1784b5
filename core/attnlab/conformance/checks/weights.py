"""Returned weights and lse, and that asking for them changes nothing. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._averages import mixed, require_average
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.laws import no_null_slot
from attnlab.conformance.checks.values import together
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import attended, define, draw, exact_and_bound, judging, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_weights_match_definition(variant: Any, case: Case) -> None:
    """Weights equal the definition's, and are exactly 0 at hidden pairs."""
    inputs = draw(case, variant)
    with torch.no_grad():
        got = inputs.run(variant, need_weights=True).weights
    require_defined(variant, "weights", define(variant, inputs))
    exact, limit = exact_and_bound(variant, inputs, "weights")
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="weights",
        versus="the float64 definition's weights",
        advice="Weights are taken after the normaliser and before dropout",
    )
    hidden = got[~inputs.visible()]
    demand(
        not bool(hidden.count_nonzero()),
        variant,
        case,
        "weights of hidden pairs are not exactly 0",
        "Hide with -inf before the normaliser; a large constant leaves weight behind",
    )


def check_weights_of_a_row_sum_to_one(variant: Any, case: Case) -> None:
    """A normalised variant's weights sum to 1 in every row that sees something, dropout or not."""
    inputs = draw(case, variant)
    more: dict[str, Any] = {"dropout_p": 0.5} if "dropout" in case.needs else {}
    with torch.no_grad():
        got = inputs.run(variant, need_weights=True, **more).weights
    demand(got is not None, variant, case, "weights were asked for and are None", "Return them in AttentionOutput")
    sums = got.to(torch.float64).sum(dim=-1)
    expected = attended(variant, inputs).to(torch.float64)
    if variant.capabilities.null_key:  # its slot takes weight that is not returned
        expected = torch.where(sums < expected, sums.clamp_min(0), expected)
    # Each of Lk weights is stored with one rounding, on top of the sums inside the normaliser.
    limit = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=1.0)
    demand_close(
        sums,
        expected,
        limit,
        variant,
        case,
        what="the sum of a row's weights",
        versus="1 (0 where it sees nothing)",
        advice="Return weights before dropout, normalised over the visible keys",
    )


def check_lse_matches_definition(variant: Any, case: Case) -> None:
    """lse is the natural logarithm of the normaliser, sinks included, as the definition has it."""
    inputs = draw(case, variant)
    with torch.no_grad():
        got = inputs.run(variant, need_lse=True).lse
    require_defined(variant, "lse", define(variant, inputs))
    if got is not None and got.isfinite().sum() > 8:
        for narrow in (torch.bfloat16, torch.float16):  # dozens of numbers with 24 bits each do not all end after 11
            demand(
                not torch.equal(got, got.to(narrow).to(got.dtype)),
                variant,
                case,
                f"every lse is a number of {narrow}: it was rounded on the way",
                "Keep lse in float32 or better from the first sum on",
            )
    exact, limit = exact_and_bound(variant, inputs, "lse")
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="lse",
        versus="the float64 definition's lse",
        advice="Natural logarithm, after scale, softcap, bias and sinks, with the row maximum added back",
    )


def check_asking_for_more_changes_nothing(variant: Any, case: Case) -> None:
    """out is the same whether weights and lse are asked for or not."""
    inputs = draw(case, variant)
    have = variant.capabilities
    asked: list[dict[str, bool]] = []
    if have.weights:
        asked.append({"need_weights": True})
    if have.lse:
        asked.append({"need_lse": True})
    if not asked:
        raise NotApplicable("it declares neither weights nor lse")
    asked.append({word: True for one in asked for word in one})
    exact, limit = exact_and_bound(variant, inputs)
    with torch.no_grad():
        for more in asked:
            demand_close(
                inputs.run(variant, **more).out,
                exact,
                limit,
                variant,
                case,
                what="out",
                versus=f"the float64 definition (with {', '.join(more)})",
                advice="Another path is taken for weights or lse, and it drops something: masks, scale or sinks",
            )


def check_out_is_weights_times_value(variant: Any, case: Case) -> None:
    """The weights that are returned are the ones that averaged the values."""
    no_null_slot(variant)
    inputs = draw(case, variant)
    judging(variant)
    require_average(variant, inputs)
    with torch.no_grad():
        answer = inputs.run(variant, need_weights=True)
    size = largest(inputs.value) * max(1.0, float(answer.weights.double().abs().sum(-1).max()))
    demand_close(
        answer.out,
        mixed(answer.weights, inputs),
        rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
        variant,
        case,
        what="out",
        versus="weights @ value, of the weights that came with it",
        advice="Return the weights of this very call: every head, hidden pairs 0, with the factor that it puts on them",
    )


def require_defined(variant: Any, what: str, defined: dict[str, Any]) -> None:
    """`NotApplicable` where the definition gives no `what`."""
    if defined.get(what) is None:
        raise NotApplicable(f"the definition of {variant.formula!r} gives no {what} to compare with")


LABELS = (
    "causal",
    "window",
    "key_mask_left",
    "mask",
    "mask_of_each",
    "segments",
    "mask_mod",
    "bias",
    "bias_of_each",
    "softcap",
    "score_mod",
    "sinks",
    "scale",
    "gqa",
    "value_dim",
    "query_dim",
    "longer_keys",
    "hiding_bias",
    "query_lengths",
)


def _cases(*needs: str) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        for label in ("", *LABELS):
            yield case(*([label] if label else []), needs=needs, dtype=scope.base)
        yield case("causal", needs=needs, dtype=scope.base, batch=1, query_length=133, key_length=133)
        for queries, keys in (
            () if scope.quick else ((3, 600), (300, 5))
        ):  # few rows that are split over keys, and many rows
            sizes = {"batch": 1, "query_length": queries, "key_length": keys}
            yield case(*declared(scope, "key_mask_left"), needs=needs, dtype=scope.base, **sizes)
        for one in together(scope, 2 if scope.quick else 12):
            yield replace(one, needs=needs)
        for dtype in scope.dtypes:
            if dtype != scope.base:
                yield case(needs=needs, dtype=dtype)
                yield case("causal", "gqa", needs=needs, dtype=dtype)

    return make


def _sums(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("key_mask_left",), ("bias",), ("gqa",)):
        yield case(*labels, needs=("weights",), dtype=scope.base)
    yield case(needs=("weights", "dropout"), dtype=scope.base, note="dropout")


def _mixing(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal", "gqa"), ("mask", "sinks"), ("key_mask_left", "value_dim"), ("score_mod", "softcap")):
        for dtype in dict.fromkeys((scope.base, scope.precise)):
            yield case(*declared(scope, *labels), needs=("weights",), dtype=dtype)
    yield case(*declared(scope, "causal"), needs=("weights",), dtype=scope.base, query_length=70, key_length=70)


CHECKS = (
    Check(check_weights_match_definition, "weights", _cases("weights")),
    Check(check_weights_of_a_row_sum_to_one, "weights", _sums, claims=("normalised",), random_too=True),
    Check(check_lse_matches_definition, "weights", _cases("lse")),
    Check(check_asking_for_more_changes_nothing, "weights", _cases(), asks_more=True),
    Check(check_out_is_weights_times_value, "weights", _mixing, claims=("linear_in_value",), random_too=True),
)
