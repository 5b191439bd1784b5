"""Returned weights and lse, gradients through them, and that requesting them changes nothing. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import mixed, no_null_slot, require_average
from attnlab.conformance.compare import diagnosis
from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.compare.tolerances import largest
from attnlab.conformance.oracle.bounds import exact_and_bound, measured_gradients
from attnlab.conformance.oracle.cases import Case, each
from attnlab.conformance.oracle.derivatives import Gradients, defined_leaves, direction_for, recorded, slopes, trained
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import attended, define, defining
from attnlab.conformance.running.check import Check, NotApplicable, Scope, small


def check_weights_match_definition(variant: Any, case: Case) -> None:
    """Weights equal the definition's, and are exactly 0 at hidden pairs."""
    inputs, compare = drawn(case, variant)
    got = inputs.answer(variant, need_weights=True).weights
    require_defined(variant, "weights", define(variant, inputs))
    exact, limit = exact_and_bound(variant, inputs, "weights")
    advice = "Weights are taken after the normaliser and before dropout"
    compare.close(got, exact, limit, "the float64 definition's weights", advice, what="weights")
    compare.demand(
        not bool(got[~inputs.visible()].count_nonzero()),
        "weights of hidden pairs are not exactly 0",
        "Hide with -inf before the normaliser; a large constant leaves weight behind",
    )


def check_weights_of_a_row_sum_to_one(variant: Any, case: Case) -> None:
    """A normalised variant's weights sum to 1 in every row that sees a key, dropout or not."""
    inputs, compare = drawn(case, variant)
    more: dict[str, Any] = {"dropout_p": 0.5} if "dropout" in case.needs else {}
    got = inputs.answer(variant, need_weights=True, **more).weights
    compare.demand(got is not None, "weights were asked for and are None", "Return them in AttentionOutput")
    sums = got.to(torch.float64).sum(dim=-1)
    expected = attended(variant, inputs).to(torch.float64)
    if variant.capabilities.null_key:  # its slot takes weight that is not returned
        expected = torch.where(sums < expected, sums.clamp_min(0), expected)
    # Each of Lk weights is stored with one rounding, on top of the sums inside the normaliser.
    versus, advice = "1 (0 where it sees nothing)", "Return weights before dropout, normalised over the visible keys"
    compare.same(sums, expected, versus, advice, "the sum of a row's weights", magnitude=1.0)


def check_lse_matches_definition(variant: Any, case: Case) -> None:
    """lse is the natural logarithm of the normaliser, sinks included, as the definition has it."""
    inputs, compare = drawn(case, variant)
    got = inputs.answer(variant, need_lse=True).lse
    require_defined(variant, "lse", define(variant, inputs))
    exact, limit = exact_and_bound(variant, inputs, "lse")
    if got is not None and got[got.isfinite()].unique().numel() > 8:
        for narrow in (torch.bfloat16, torch.float16):  # dozens of numbers with 24 bits each do not all end after 11
            rounded, right = (torch.equal(x, x.to(narrow).to(x.dtype)) for x in (got, exact.to(got.dtype)))
            compare.demand(
                right or not rounded,
                f"every lse is a number of {narrow}: it was rounded on the way",
                "Keep lse in float32 or better from the first sum on",
            )

    def told() -> str:
        return diagnosis.of_lse(got, exact, limit)

    compare.close(got, exact, limit, "the float64 definition's lse", told, what="lse")


def check_requesting_weights_or_lse_changes_no_output(variant: Any, case: Case) -> None:
    """out is the same whether weights and lse are requested or not."""
    inputs, compare = drawn(case, variant)
    features = [f"need_{what}" for what in ("weights", "lse") if getattr(variant.capabilities, what)]
    if not features:
        raise NotApplicable("it declares neither weights nor lse")
    exact, limit = exact_and_bound(variant, inputs)
    advice = "Another path is taken for weights or lse, and it drops something: masks, scale or sinks"
    for names in (*([name] for name in features), features):
        got = inputs.out(variant, **dict.fromkeys(names, True))
        compare.close(got, exact, limit, f"the float64 definition (with {', '.join(names)})", advice)


def check_out_is_weights_times_value(variant: Any, case: Case) -> None:
    """The weights that are returned are the ones that averaged the values."""
    no_null_slot(variant)
    inputs, compare = drawn(case, variant)
    defining(variant)
    require_average(variant, inputs)
    answer = inputs.answer(variant, need_weights=True)
    compare.same(
        answer.out,
        mixed(answer.weights, inputs),
        "weights @ value, of the weights that came with it",
        "Return the weights of this very call: every head, hidden pairs 0, with the factor that it puts on them",
        magnitude=largest(inputs.value) * max(1.0, float(answer.weights.double().abs().sum(-1).max())),
    )


def check_gradients_flow_through_weights(variant: Any, case: Case) -> None:
    """Weights declared `in_graph` have the definition's gradients, by input and by parameter.

    `NotApplicable` where the definition's weights depend on neither, as those of fixed places do.
    """
    if variant.capabilities.weights != "in_graph":
        raise NotApplicable(f"weights are {variant.capabilities.weights!r}, only 'in_graph' promises gradients")
    inputs, compare = drawn(case, variant)
    require_exact(variant, inputs)
    generator = torch.Generator().manual_seed(case.seed + 3)
    shape = (case.batch, case.num_heads, case.query_length, case.key_length)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.device)

    def loss(answer: dict[str, Any], defined: bool) -> Tensor:
        weights = answer["weights"]
        if defined and not weights.requires_grad:
            raise NotApplicable("its definition's weights depend on no input and no parameter")
        advice = "Return the weights of the forward itself, or declare weights='recomputed'"
        compare.demand(weights is not None and weights.requires_grad, "weights carry no gradient", advice)
        total: Tensor = (weights * direction.to(weights.dtype)).sum()
        return total

    exact = _defined_slopes(compare, loss, largest(direction))
    got = _own_slopes(compare, loss, "need_weights")
    compare.close_gradients(
        got, exact, "Do not detach the weights that are returned", "the definition's", "gradient through weights"
    )


def check_gradients_flow_through_lse(variant: Any, case: Case) -> None:
    """Where lse carries a gradient it is the definition's, alone and together with out's, as merging partial results needs it."""
    inputs, compare = drawn(case, variant)
    require_exact(variant, inputs)
    require_defined(variant, "lse", define(variant, inputs))
    direction = direction_for(inputs)
    lean = direction.sum(-1) * inputs.visible().any(-1)  # lse of a row that sees nothing is a constant

    def loss(answer: dict[str, Any], defined: bool) -> Tensor:
        out, lse = answer["out"], answer["lse"]
        if not defined and not lse.requires_grad:
            raise NotApplicable("its lse carries no gradient")
        of_lse = (torch.where(lean == 0, 0, lse) * lean.to(lse.dtype)).sum()
        total: Tensor = of_lse + (out * direction.to(out.dtype)).sum().to(lse.dtype)
        return total

    got = _own_slopes(compare, loss, "need_lse")
    exact = _defined_slopes(compare, loss, max(largest(lean), largest(direction) * largest(inputs.value)))
    advice = "d lse / d score is the weight: a backward of its own adds it, or marks lse as not differentiable"
    compare.close_gradients(got, exact, advice, "the definition's, of a loss on out and lse")


Loss = Callable[[dict[str, Any], bool], Tensor]
"""Of an answer's out, weights and lse, and whether it is the definition's."""


def _own_slopes(compare: Comparer, loss: Loss, feature: str) -> Gradients:
    """The variant's gradients of a loss, by input and parameter."""
    leaves = recorded(compare.inputs.tensors())
    with torch.enable_grad():
        answer = compare.inputs.rebuilt(leaves).run(compare.variant, **{feature: True})._asdict()
        return slopes(loss(answer, False), {**leaves, **trained(compare.variant)})


def _defined_slopes(compare: Comparer, loss: Loss, magnitude: float) -> dict[str, Any]:
    """The definition's, and their bounds."""
    variant, visible = compare.variant, compare.inputs.visible()

    def answer(dtype: torch.dtype) -> Gradients:
        call, parameters, leaves = defined_leaves(variant, compare.inputs, dtype)
        with torch.enable_grad():
            defined = define(variant, call, dtype=dtype, visible=visible, parameters=parameters)
            return slopes(loss(defined, True), leaves)

    return measured_gradients(compare.case, answer, magnitude)


def require_defined(variant: Any, what: str, defined: dict[str, Any]) -> None:
    """`NotApplicable` where the definition gives no `what`."""
    if defined.get(what) is None:
        raise NotApplicable(f"the definition of {variant.formula!r} gives no {what} to compare with")


def _requests(need: str) -> Any:
    """Requests for weights or lse, or for neither ("")."""

    def make(scope: Scope) -> Iterable[Case]:
        needs = (need,) if need else ()
        yield from scope.requests(*needs, without=("contents", "layout"), change=small, full=60, quick=12, seed=4000)
        for dtype in scope.other_dtypes:
            yield from each("", "causal+gqa", needs=needs, dtype=dtype)
        length = 70 if scope.stepwise else 300
        yield from scope.cases("", needs=needs, batch=1, query_length=3, key_length=length)

    return make


def _sums(scope: Scope) -> Iterable[Case]:
    yield from scope.requests(
        "weights", without=("contents", "layout", "sinks"), change=small, full=30, quick=8, seed=5000
    )
    yield from scope.cases("", needs=("weights", "dropout"), note="dropout")


def _mixing(scope: Scope) -> Iterable[Case]:
    without = ("contents", "layout")
    return scope.requests("weights", without=without, change=small, full=40, quick=8, seed=6000)


def _through(scope: Scope) -> Iterable[Case]:
    return scope.requests(
        "weights", "backward", without=("contents", "layout"), change=small, full=40, quick=8, seed=7000
    )


def _lse(scope: Scope) -> Iterable[Case]:
    return scope.requests("lse", "backward", without=("contents", "layout"), change=small, full=40, quick=8, seed=8000)


CHECKS = (
    Check(check_weights_match_definition, "weights", _requests("weights")),
    Check(check_weights_of_a_row_sum_to_one, "weights", _sums, claims=("normalised",), random_too=True),
    Check(check_lse_matches_definition, "weights", _requests("lse")),
    Check(check_requesting_weights_or_lse_changes_no_output, "weights", _requests(""), asks_more=True),
    Check(
        check_out_is_weights_times_value,
        "weights",
        _mixing,
        claims=("linear_in_value",),
        unless=("projects_values",),
        random_too=True,
    ),
    Check(check_gradients_flow_through_weights, "weights", _through),
    Check(check_gradients_flow_through_lse, "weights", _lse),
)
