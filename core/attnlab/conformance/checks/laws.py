"""The laws of docs/contract.md, each switched on by the property it follows from. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import no_null_slot, require_average
from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, attended, define, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_key_permutation_invariance(variant: Any, case: Case) -> None:
    """Keys, values and their key mask in another order give the same output."""
    inputs, compare = drawn(case, variant)
    order = torch.randperm(case.key_length, generator=torch.Generator().manual_seed(4)).to(case.device)
    moved = inputs.changed(lambda x: x[:, :, order], "key", "value")
    if "key_mask" in inputs.arguments:
        moved = moved.with_tensors(key_mask=inputs.arguments["key_mask"][:, order])
    advice = "Drop the claim `position_free`, or look for a dependence on the key's index"
    _agree(compare, moved, "the call with keys in their first order", advice)


def check_query_permutation_equivariance(variant: Any, case: Case) -> None:
    """Queries in another order give the outputs in that order."""
    inputs, compare = drawn(case, variant)
    order = torch.randperm(case.query_length, generator=torch.Generator().manual_seed(5)).to(case.device)
    moved = inputs.changed(lambda x: x[:, :, order], "query")
    advice = "Drop the claim `position_free`, or look for a dependence on the query's index"
    _agree(compare, moved, "the outputs permuted alike", advice, inputs.out(variant)[:, :, order])


def check_linear_in_value(variant: Any, case: Case) -> None:
    """out(2 v + 3 w) = 2 out(v) + 3 out(w)."""
    inputs, compare = drawn(case, variant)
    other = draw(replace(case, seed=case.seed + 13), variant).value
    expected = 2 * inputs.out(variant) + 3 * inputs.with_tensors(value=other).out(variant)
    mixed = inputs.with_tensors(value=2 * inputs.value + 3 * other)
    advice = "Drop the claim `linear_in_value`, or keep values out of the weights"
    _agree(compare, mixed, "2 out(v) + 3 out(w)", advice, expected)


def check_equal_values_are_returned(variant: Any, case: Case) -> None:
    """Where every value is the same vector, a normalised mean of them is that vector."""
    no_null_slot(variant)
    inputs, compare = drawn(case, variant)
    require_average(variant, inputs)
    same = inputs.value[:, :1, :1].expand_as(inputs.value).clone()
    sees = attended(variant, inputs).unsqueeze(-1)
    expected = torch.where(sees, same[:, :1, :1].expand(-1, case.num_heads, case.query_length, -1), 0)
    advice = "The normaliser must sum exactly the weights that the numerator uses"
    _agree(compare, inputs.with_tensors(value=same), "the value that all keys carry", advice, expected)


def check_a_single_visible_key_returns_its_value(variant: Any, case: Case) -> None:
    """A query that sees one key returns that key's value."""
    no_null_slot(variant)
    inputs, compare = drawn(case, variant)
    chosen = 2
    present = torch.zeros(case.batch, case.key_length, dtype=torch.bool, device=case.device)
    present[:, chosen] = True
    value = _per_query_head(inputs)[:, :, chosen : chosen + 1]
    alone = inputs.with_tensors(key_mask=present)
    require_average(variant, alone)
    expected = torch.where(attended(variant, alone).unsqueeze(-1), value, 0)
    advice = "The normaliser must leave padded keys out"
    _agree(compare, alone, f"the value of key {chosen}, the only one present", advice, expected)


def check_duplicated_keys_change_no_output(variant: Any, case: Case) -> None:
    """Every key and value twice gives the same normalised mean."""
    no_null_slot(variant)
    inputs, compare = drawn(case, variant)
    twice = inputs.changed(lambda x: x.repeat(1, 1, 2, 1), "key", "value")
    _law_of_its_formula(variant, inputs, twice)
    advice = "Weights are a quotient: numerator and normaliser both double"
    _agree(compare, twice, "the call with each key once", advice)


def check_scale_zero_gives_the_mean(variant: Any, case: Case) -> None:
    """With scale=0 all scores are equal: out is the mean of the visible values."""
    no_null_slot(variant)
    inputs = draw(case, variant).with_tensors(scale=0.0)
    visible = inputs.visible().to(torch.float64)
    expected = visible @ _per_query_head(inputs).to(torch.float64) / visible.sum(dim=-1, keepdim=True).clamp_min(1)
    _law_of_its_formula(variant, inputs, inputs, expected)
    advice = "scale= is ignored, or applied after the softmax"
    _agree(Comparer(variant, inputs), inputs, "the mean of the visible values", advice, expected)


def check_default_scale_is_used(variant: Any, case: Case) -> None:
    """`scale=default_scale()` changes nothing: what the variant tells adapters is what it does."""
    default = variant.default_scale()
    if default is None:
        raise NotApplicable("its formula has no scale")
    inputs, compare = drawn(case, variant)
    advice = (
        "default_scale() is read by adapters and tools: override it where the formula's scale is another than Dk^-0.5"
    )
    _agree(compare, inputs.with_tensors(scale=default), "the call without scale=", advice)


def check_packed_sequences_equal_separate_ones(variant: Any, case: Case) -> None:
    """Two sequences in one row, told apart by segments, give what each gives alone."""
    inputs, compare = drawn(case, variant)
    ids = _second_half(case).long().expand(case.batch, -1)
    advice = "Segments hide every pair across their border; positions and alignments restart in each"
    _agree(compare, inputs.with_tensors(segments=(ids, ids)), SEPARATELY, advice, _halves(variant, inputs))


def check_shift_invariance(variant: Any, case: Case) -> None:
    """Where `shift_invariant` is claimed: two sequences in one row, told apart by a mask alone, give what each gives alone."""
    if variant.capabilities.position_free or not variant.shift_invariant:
        raise NotApplicable("it claims no shift_invariant beside positions that it reads")
    inputs, compare = drawn(case, variant)
    second = _second_half(case)
    advice = "Only differences of positions may count where shift_invariant is claimed; drop the claim if a position counts from 0"
    _agree(compare, inputs.with_tensors(mask=second[:, None] == second), SEPARATELY, advice, _halves(variant, inputs))


SEPARATELY = "the two sequences run separately"


def _second_half(case: Case) -> Tensor:
    """Which tokens belong to the second of two sequences, bool `[L]`."""
    return torch.arange(case.key_length, device=case.device) >= case.key_length // 2 - 1


def _halves(variant: Any, inputs: Inputs) -> Tensor:
    """Out of the two sequences, each in a call of its own."""
    second = _second_half(inputs.case)
    return torch.cat([inputs.changed(lambda x: x[:, :, part]).out(variant) for part in (~second, second)], dim=2)  # noqa: B023


def check_null_key_takes_weight(variant: Any, case: Case) -> None:
    """Where claimed: values that are all one vector do not come through whole, as the slot takes a share of the weight."""
    inputs, compare = drawn(case, variant)
    same = inputs.with_tensors(value=torch.ones_like(inputs.value))
    sees = same.visible().any(dim=-1, keepdim=True)
    size = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=1.0).limit
    compare.demand(
        bool(((same.out(variant) - 1).abs() > 4 * size).any(dim=-1, keepdim=True)[sees].any()),
        "null_key is claimed, and values of 1 give an out of 1 in every row: no slot takes weight",
        "Drop the claim `null_key`, or let the slot join the normaliser",
    )


def _per_query_head(inputs: Inputs) -> Tensor:
    """Values repeated for the query heads that read them."""
    return inputs.value.repeat_interleave(inputs.query.shape[1] // inputs.value.shape[1], dim=1)


def _law_of_its_formula(variant: Any, inputs: Inputs, changed: Inputs, expected: Tensor | None = None) -> None:
    """`NotApplicable` where the definition itself breaks the law.

    It belongs to weights that are a quotient of one function of each score, which a normalised variant need not have
    (sparsemax, the k best, a sample).
    """
    with torch.no_grad():
        other = define(variant, changed)["out"]
        expected = define(variant, inputs)["out"] if expected is None else expected
    if largest(other - expected) > 1e-6 * largest(inputs.value):
        raise NotApplicable("its definition does not obey this law of softmax, so nothing asks it to")
    require_exact(variant, inputs)


def _agree(compare: Comparer, changed: Inputs, versus: str, advice: str, expected: Tensor | None = None) -> None:
    """Fail unless the changed call gives what is expected, the first call's out unless stated."""
    expected = compare.inputs.out(compare.variant) if expected is None else expected
    sizes: dict[str, Any] = {"terms": 2 * reduction_terms(compare.case)}
    sizes["magnitude"] = max(largest(compare.inputs.value), largest(changed.value))
    compare.same(changed.out(compare.variant), expected, versus, advice, **sizes)


def _plain(*labels: str, needs: tuple[str, ...] = ()) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        yield from scope.cases("", *labels, needs=needs)
        for dtype in dict.fromkeys((scope.precise, *scope.dtypes[-1:])):
            if dtype != scope.base:
                yield case(needs=needs, dtype=dtype)

    return make


def _softmax(scope: Scope) -> Iterable[Case]:
    return _plain("causal", "mask", "gqa", needs=("scale",))(scope) if scope.family == "score" else []


def _law(function: Any, cases: Any, *claims: str, random_too: bool = False) -> Check:
    return Check(function, "laws", cases, claims=claims, random_too=random_too)


_SHORT = _plain("key_mask_left", "gqa")
_HIDING = _plain("causal", "mask", "key_mask_left", "window", "gqa")
_SCALED = _plain("gqa", "value_dim", needs=("scale",))
CHECKS = (
    _law(check_null_key_takes_weight, _plain(), "null_key", random_too=True),
    _law(check_key_permutation_invariance, _SHORT, "position_free"),
    _law(check_query_permutation_equivariance, _SHORT, "position_free"),
    _law(check_linear_in_value, _plain("causal", "gqa"), "linear_in_value", random_too=True),
    _law(check_equal_values_are_returned, _HIDING, "normalised", random_too=True),
    _law(
        check_a_single_visible_key_returns_its_value, _plain("gqa", needs=("key_mask",)), "normalised", random_too=True
    ),
    _law(
        check_duplicated_keys_change_no_output, _plain("gqa", needs=("cross_lengths",)), "normalised", "position_free"
    ),
    _law(check_default_scale_is_used, _SCALED, random_too=True),
    _law(check_scale_zero_gives_the_mean, _softmax, "normalised"),
    _law(check_packed_sequences_equal_separate_ones, _plain("causal", needs=("segments",))),
    _law(check_shift_invariance, _plain("causal", needs=("mask",))),
)
