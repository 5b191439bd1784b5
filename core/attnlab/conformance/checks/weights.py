"""Returned weights and lse, and that asking for them changes nothing. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from attnlab.conformance.cases import Case, case
from attnlab.conformance.check import Check, NotApplicable, Scope
from attnlab.conformance.inputs import attended, define, draw, exact_and_bound, plain_dtype, reduction_terms
from attnlab.conformance.messages import demand, demand_close
from attnlab.conformance.tolerances import bound, largest, rounding_bound


def check_weights_match_definition(variant: Any, case: Case) -> None:
    """Weights equal the definition's, and are exactly 0 at hidden pairs."""
    inputs = draw(case, variant)
    with torch.no_grad():
        got = inputs.run(variant, need_weights=True).weights
    _require(variant, "weights", define(variant, inputs))
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
    demand(
        got is not None,
        variant,
        case,
        "weights were asked for and are None",
        "Return them in AttentionOutput",
    )
    sums = got.to(torch.float64).sum(dim=-1)
    expected = attended(variant, inputs).to(torch.float64)
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
    _require(variant, "lse", define(variant, inputs))
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


def check_gradients_flow_through_weights(variant: Any, case: Case) -> None:
    """Weights declared `in_graph` have the definition's gradients."""
    if variant.capabilities.weights != "in_graph":
        raise NotApplicable(
            f"weights are {variant.capabilities.weights!r}, only 'in_graph' promises gradients"
        )
    inputs = draw(case, variant)
    generator = torch.Generator().manual_seed(case.seed + 3)
    shape = (case.batch, case.num_heads, case.query_length, case.key_length)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.device)
    visible = inputs.visible()

    def through(dtype: torch.dtype, judged: bool) -> dict[str, torch.Tensor]:
        leaves = {n: x.clone().to(dtype).requires_grad_() for n, x in inputs.tensors().items()}
        with torch.enable_grad():
            call = inputs.rebuilt(leaves)
            weights = (
                call.run(variant, need_weights=True).weights
                if judged
                else define(variant, call, dtype=dtype, visible=visible)["weights"]
            )
            demand(
                weights is not None and weights.requires_grad,
                variant,
                case,
                "weights carry no gradient",
                "Return the weights of the forward itself, or declare weights='recomputed'",
            )
            grads = torch.autograd.grad(
                weights,
                list(leaves.values()),
                direction.to(weights.dtype),
                allow_unused=True,
                materialize_grads=True,
            )
        return dict(zip(leaves, grads, strict=True))

    low = plain_dtype(case.dtype)
    found = through(inputs.query.dtype, True)
    exact, plain = through(torch.float64, False), through(getattr(torch, low), False)
    for name, expected in exact.items():
        limit = bound(
            case.dtype,
            exact=expected,
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case),
            magnitude=largest(direction),
        )
        demand_close(
            found[name],
            expected,
            limit,
            variant,
            case,
            what=f"gradient through weights of {name}",
            versus="the definition's",
            advice="Do not detach the weights that are returned",
        )


def _require(variant: Any, what: str, defined: dict[str, Any]) -> None:
    if defined.get(what) is None:
        raise NotApplicable(f"the definition of {variant.formula!r} gives no {what} to compare with")


LABELS = (
    "causal",
    "window",
    "key_mask_left",
    "mask",
    "segments",
    "mask_mod",
    "bias",
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
        for dtype in scope.dtypes:
            if dtype != scope.base:
                yield case(needs=needs, dtype=dtype)
                yield case("causal", "gqa", needs=needs, dtype=dtype)

    return make


def _sums(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("key_mask_left",), ("bias",), ("gqa",)):
        yield case(*labels, needs=("weights",), dtype=scope.base)
    yield case(needs=("weights", "dropout"), dtype=scope.base, note="dropout")


def _through(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("gqa",)):
        yield case(*labels, needs=("weights", "backward"), dtype=scope.base)


CHECKS = (
    Check(check_weights_match_definition, "weights", _cases("weights")),
    Check(check_weights_of_a_row_sum_to_one, "weights", _sums, claims=("normalised",)),
    Check(check_lse_matches_definition, "weights", _cases("lse")),
    Check(check_asking_for_more_changes_nothing, "weights", _cases(), asks_more=True),
    Check(check_gradients_flow_through_weights, "weights", _through),
)
