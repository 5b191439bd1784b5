"""The laws of docs/contract.md, each switched on by the property it follows from. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import require_average
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, attended, define, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_permuting_keys_changes_nothing(variant: Any, case: Case) -> None:
    """Keys, values and their key mask in another order give the same output."""
    inputs = draw(case, variant)
    order = torch.randperm(case.key_length, generator=torch.Generator().manual_seed(4)).to(case.device)
    moved: dict[str, Any] = {"key": inputs.key[:, :, order], "value": inputs.value[:, :, order]}
    if "key_mask" in inputs.arguments:
        moved["key_mask"] = inputs.arguments["key_mask"][:, order]
    _agree(
        variant,
        inputs,
        inputs.with_tensors(**moved),
        "the call with keys in their first order",
        "Drop the claim `position_free`, or look for a dependence on the key's index",
    )


def check_permuting_queries_permutes_outputs(variant: Any, case: Case) -> None:
    """Queries in another order give the outputs in that order."""
    inputs = draw(case, variant)
    order = torch.randperm(case.query_length, generator=torch.Generator().manual_seed(5)).to(case.device)
    with torch.no_grad():
        expected = inputs.run(variant).out[:, :, order]
    _agree(
        variant,
        inputs,
        inputs.with_tensors(query=inputs.query[:, :, order]),
        "the outputs permuted alike",
        "Drop the claim `position_free`, or look for a dependence on the query's index",
        expected,
    )


def check_linear_in_value(variant: Any, case: Case) -> None:
    """out(2 v + 3 w) = 2 out(v) + 3 out(w)."""
    inputs = draw(case, variant)
    other = draw(replace(case, seed=case.seed + 13), variant).value
    with torch.no_grad():
        expected = 2 * inputs.run(variant).out + 3 * inputs.with_tensors(value=other).run(variant).out
    _agree(
        variant,
        inputs,
        inputs.with_tensors(value=2 * inputs.value + 3 * other),
        "2 out(v) + 3 out(w)",
        "Drop the claim `linear_in_value`, or keep values out of the weights",
        expected,
    )


def check_equal_values_come_through(variant: Any, case: Case) -> None:
    """Where every value is the same vector, a normalised mean of them is that vector."""
    no_null_slot(variant)
    inputs = draw(case, variant)
    require_average(variant, inputs)
    same = inputs.value[:, :1, :1].expand_as(inputs.value).clone()
    sees = attended(variant, inputs).unsqueeze(-1)
    expected = torch.where(sees, same[:, :1, :1].expand(-1, case.num_heads, case.query_length, -1), 0)
    _agree(
        variant,
        inputs,
        inputs.with_tensors(value=same),
        "the value that all keys carry",
        "The normaliser must sum exactly the weights that the numerator uses",
        expected,
    )


def check_one_visible_key_copies_its_value(variant: Any, case: Case) -> None:
    """A query that sees one key returns that key's value."""
    no_null_slot(variant)
    inputs = draw(case, variant)
    chosen = 2
    present = torch.zeros(case.batch, case.key_length, dtype=torch.bool, device=case.device)
    present[:, chosen] = True
    group = case.num_heads // case.num_kv_heads
    value = inputs.value.repeat_interleave(group, dim=1)[:, :, chosen : chosen + 1]
    alone = inputs.with_tensors(key_mask=present)
    require_average(variant, alone)
    expected = torch.where(attended(variant, alone).unsqueeze(-1), value, 0)
    _agree(
        variant,
        inputs,
        alone,
        f"the value of key {chosen}, the only one present",
        "The normaliser must leave absent keys out",
        expected,
    )


def check_duplicated_keys_change_nothing(variant: Any, case: Case) -> None:
    """Every key and value twice gives the same normalised mean."""
    no_null_slot(variant)
    inputs = draw(case, variant)
    twice = inputs.with_tensors(key=inputs.key.repeat(1, 1, 2, 1), value=inputs.value.repeat(1, 1, 2, 1))
    _law_of_its_formula(variant, inputs, twice)
    _agree(
        variant,
        inputs,
        twice,
        "the call with each key once",
        "Weights are a quotient: numerator and normaliser both double",
    )


def check_scale_zero_gives_the_mean(variant: Any, case: Case) -> None:
    """With scale=0 all scores are equal: out is the mean of the visible values."""
    no_null_slot(variant)
    inputs = draw(case, variant).with_tensors(scale=0.0)
    seen = inputs.visible().to(torch.float64)
    group = case.num_heads // case.num_kv_heads
    value = inputs.value.to(torch.float64).repeat_interleave(group, dim=1)
    expected = seen @ value / seen.sum(dim=-1, keepdim=True).clamp_min(1)
    _law_of_its_formula(variant, inputs, inputs, expected)
    _agree(
        variant,
        inputs,
        inputs,
        "the mean of the visible values",
        "scale= is ignored, or applied after the softmax",
        expected,
    )


def check_the_default_scale_is_the_one_in_use(variant: Any, case: Case) -> None:
    """`scale=default_scale()` changes nothing: what the variant tells adapters is what it does."""
    default = variant.default_scale()
    if default is None:
        raise NotApplicable("its formula has no scale")
    inputs = draw(case, variant)
    _agree(
        variant,
        inputs,
        inputs.with_tensors(scale=default),
        "the call without scale=",
        "default_scale() is read by adapters and tools: override it where the formula's scale is another than Dk^-0.5",
    )


def check_packed_sequences_equal_separate_ones(variant: Any, case: Case) -> None:
    """Two sequences in one row, told apart by segments, give what each gives alone."""
    inputs = draw(case, variant)
    cut = case.key_length // 2 - 1
    ids = (torch.arange(case.key_length, device=case.device) >= cut).long().expand(case.batch, -1)

    def part(window: slice) -> Inputs:
        named = {n: x[:, :, window] for n, x in inputs.tensors().items()}
        return inputs.rebuilt(named)

    with torch.no_grad():
        separate = torch.cat([part(s).run(variant).out for s in (slice(0, cut), slice(cut, None))], dim=2)
    _agree(
        variant,
        inputs,
        inputs.with_tensors(segments=(ids, ids)),
        "the two sequences run separately",
        "Segments hide every pair across their border; positions and alignments restart in each",
        separate,
    )


def check_a_sequence_may_begin_anywhere(variant: Any, case: Case) -> None:
    """Where `shift_invariant` is claimed: two sequences in one row, told apart by a mask alone, give what each gives alone."""
    if variant.capabilities.position_free or not variant.shift_invariant:
        raise NotApplicable("it claims no shift_invariant beside positions that it reads")
    inputs = draw(case, variant)
    cut = case.key_length // 2 - 1
    of_second = torch.arange(case.key_length, device=case.device) >= cut

    def part(window: slice) -> Inputs:
        return inputs.rebuilt({n: x[:, :, window] for n, x in inputs.tensors().items()})

    with torch.no_grad():
        separate = torch.cat([part(s).run(variant).out for s in (slice(0, cut), slice(cut, None))], dim=2)
    _agree(
        variant,
        inputs,
        inputs.with_tensors(mask=of_second[:, None] == of_second),
        "the two sequences run separately",
        "Only differences of positions may count where shift_invariant is claimed; drop the claim if a position counts from 0",
        separate,
    )


def check_null_key_takes_weight(variant: Any, case: Case) -> None:
    """Where claimed: values that are all one vector do not come through whole, as the slot takes a share of the weight."""
    inputs = draw(case, variant)
    same = inputs.with_tensors(value=torch.ones_like(inputs.value))
    with torch.no_grad():
        out = same.run(variant).out
    sees = same.visible().any(dim=-1, keepdim=True)
    size = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=1.0).limit
    demand(
        bool(((out - 1).abs() > 4 * size).any(dim=-1, keepdim=True)[sees].any()),
        variant,
        case,
        "null_key is claimed, and values of 1 give an out of 1 in every row: no slot takes weight",
        "Drop the claim `null_key`, or let the slot join the normaliser",
    )


def no_null_slot(variant: Any) -> None:
    """`NotApplicable` where a slot without a value takes part of the weight."""
    if variant.capabilities.null_key:
        raise NotApplicable("it declares null_key: a slot without a value takes part of the weight")


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


def _agree(
    variant: Any, inputs: Inputs, changed: Inputs, versus: str, advice: str, expected: Tensor | None = None
) -> None:
    case = inputs.case
    with torch.no_grad():
        got = changed.run(variant).out
        if expected is None:
            expected = inputs.run(variant).out
    size = max(largest(expected), largest(inputs.value), largest(changed.value))
    limit = rounding_bound(case.dtype, terms=2 * reduction_terms(case), magnitude=size)
    demand_close(got, expected, limit, variant, case, what="out", versus=versus, advice=advice)


def _plain(*labels: tuple[str, ...], needs: tuple[str, ...] = ()) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        for one in ((), *labels):
            yield case(*one, needs=needs, dtype=scope.base)
        for dtype in dict.fromkeys((scope.precise, *scope.dtypes[-1:])):
            if dtype != scope.base:
                yield case(needs=needs, dtype=dtype)

    return make


def _softmax(scope: Scope) -> Iterable[Case]:
    if scope.family == "score":
        yield from _plain(("causal",), ("mask",), ("gqa",), needs=("scale",))(scope)


CHECKS = (
    Check(check_null_key_takes_weight, "laws", _plain(), claims=("null_key",), random_too=True),
    Check(
        check_permuting_keys_changes_nothing, "laws", _plain(("key_mask_left",), ("gqa",)), claims=("position_free",)
    ),
    Check(
        check_permuting_queries_permutes_outputs,
        "laws",
        _plain(("key_mask_left",), ("gqa",)),
        claims=("position_free",),
    ),
    Check(check_linear_in_value, "laws", _plain(("causal",), ("gqa",)), claims=("linear_in_value",), random_too=True),
    Check(
        check_equal_values_come_through,
        "laws",
        _plain(("causal",), ("mask",), ("key_mask_left",), ("window",), ("gqa",)),
        claims=("normalised",),
        random_too=True,
    ),
    Check(
        check_one_visible_key_copies_its_value,
        "laws",
        _plain(("gqa",), needs=("key_mask",)),
        claims=("normalised",),
        random_too=True,
    ),
    Check(
        check_duplicated_keys_change_nothing,
        "laws",
        _plain(("gqa",), needs=("cross_lengths",)),
        claims=("normalised", "position_free"),
    ),
    Check(
        check_the_default_scale_is_the_one_in_use,
        "laws",
        _plain(("gqa",), ("value_dim",), needs=("scale",)),
        random_too=True,
    ),
    Check(check_scale_zero_gives_the_mean, "laws", _softmax, claims=("normalised",)),
    Check(check_packed_sequences_equal_separate_ones, "laws", _plain(("causal",), needs=("segments",))),
    Check(check_a_sequence_may_begin_anywhere, "laws", _plain(("causal",), needs=("mask",))),
)
