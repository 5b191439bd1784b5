"""Correct variants, plain and unusual, pass every check: a failure here is a false alarm of the suite."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import Attention, AttentionOutput, Call, Reason, Request
from attnlab.conformance import CheckResult, run_checks
from attnlab.conformance.oracle.cases import case
from attnlab.conformance.oracle.draws import is_random
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.subject import subject_of
from attnlab_evaluations.suite_proof.correct import CORRECT, TextbookAttention
from attnlab_evaluations.suite_proof.correct.heads import (
    MultiQueryAttention,
    SingleHeadAttention,
    TalkingHeadsAttention,
)
from attnlab_evaluations.suite_proof.correct.limits import Float64Attention
from attnlab_evaluations.suite_proof.correct.normalisers import SigmoidAttention, SparsemaxAttention, TopKAttention
from attnlab_evaluations.suite_proof.correct.null_slots import NullSlotAttention
from attnlab_evaluations.suite_proof.correct.pooled import ProjectedLengthAttention
from attnlab_evaluations.suite_proof.correct.required import (
    CausalSquareAttention,
    DampedAttention,
    FixedWindowAttention,
    RoundedAttention,
    ShortDelta,
    SinkhornAttention,
)
from attnlab_evaluations.suite_proof.correct.sampled import SampledAttention
from attnlab_evaluations.suite_proof.correct.sums import RandomExponentialAttention, RandomReluAttention

each = pytest.mark.parametrize("variant", CORRECT, ids=lambda cls: cls.__name__)


def alarms(results: list[CheckResult]) -> str:
    return "\n".join(f"{r.check} [{r.case}] {r.status}: {r.message}" for r in results if not r.ok)


def of(results: list[CheckResult], check: str) -> list[CheckResult]:
    return [r for r in results if r.check == check]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(cls, id=cls.__name__, marks=[pytest.mark.full] if position % 4 else [])
        for position, cls in enumerate(CORRECT)
    ],
)
def test_no_check_raises_a_false_alarm_in_a_quick_run(variant: type[Attention]) -> None:
    results = run_checks(variant, quick=True)
    assert not alarms(results), alarms(results)
    assert sum(r.status == "passed" for r in results) > 20


@pytest.mark.full
@each
def test_no_check_raises_a_false_alarm_in_a_full_run(variant: type[Attention]) -> None:
    results = run_checks(variant)
    assert not alarms(results), alarms(results)


def test_there_are_many_and_each_is_of_its_own_kind() -> None:
    assert len(CORRECT) >= 16
    assert len({cls.__name__ for cls in CORRECT}) == len(CORRECT)
    assert {cls.family for cls in CORRECT} == {"plain", "score", "feature_map", "recurrent"}


@each
def test_each_says_what_it_computes_and_from_where(variant: type[Attention]) -> None:
    text = inspect.getdoc(variant)
    assert text
    assert text.splitlines()[0].endswith((".", "`", ":", ","))
    made = subject_of(variant).probe
    assert not made.capabilities.within(variant.capabilities)
    own = variant.definition
    assert own is None or not hasattr(own, "__self__")


# -- what keeps these alarms quiet must not keep a mistake quiet ------------------------------------------------


class BiasedSample(SampledAttention):
    """Draws with probabilities of twice the scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        call.scale = 2 * (self.key_dim**-0.5 if call.scale is None else call.scale)
        return super().attend(query, key, value, call)


class UnseededSample(SampledAttention):
    """Claims to be deterministic and draws all the same."""

    capabilities = replace(SampledAttention.capabilities, deterministic=True)


def test_a_random_variant_with_the_wrong_mean_is_found() -> None:
    results = run_checks(BiasedSample, only="agrees_with_definition", quick=True)
    failed = [r for r in results if r.status == "failed"]
    assert failed
    assert "the mean of out" in failed[0].message


def test_a_claim_of_determinism_is_held_against_a_draw() -> None:
    results = run_checks(UnseededSample, only="determinism", quick=True)
    assert "failed" in {r.status for r in results}


def test_a_random_variant_is_found_by_its_seeds_and_an_exact_one_is_not() -> None:
    inputs = draw(case(), SampledAttention(num_heads=2, head_dim=8))
    assert is_random(SampledAttention(num_heads=2, head_dim=8), inputs)
    assert not is_random(UnseededSample(num_heads=2, head_dim=8), inputs)
    silent = type(
        "Silent", (TextbookAttention,), {"capabilities": replace(TextbookAttention.capabilities, deterministic=False)}
    )
    assert not is_random(silent(num_heads=2, head_dim=8), inputs)


def test_a_variant_that_claims_no_property_is_compared_with_its_definition_all_the_same() -> None:
    """`exact` is given up with a reason, or not at all."""
    silent = replace(TextbookAttention.capabilities, exact=False, deterministic=False)

    class DoublesScores(TextbookAttention):
        capabilities = silent

        def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
            return 2 * super().scores(q, k, call)

    results = run_checks(DoublesScores, only="agrees_with_definition", quick=True)
    assert any(r.status == "failed" for r in results)
    assert {r.status for r in results} == {"failed", "not applicable"}  # a plain call says enough


def test_giving_up_exact_is_told_with_its_reason() -> None:
    results = of(run_checks(RandomExponentialAttention, only="values", quick=True), "agrees_with_definition")
    assert {r.status for r in results} == {"not applicable"}
    assert "random features approximate softmax" in results[0].message


def test_a_law_of_softmax_is_asked_only_where_the_definition_obeys_it() -> None:
    for variant in (SparsemaxAttention, TopKAttention):
        results = run_checks(variant, only="duplicated_keys_change_no_output", quick=True)
        assert {r.status for r in results} == {"not applicable"}
    results = run_checks(TextbookAttention, only="duplicated_keys_change_no_output", quick=True)
    assert {r.status for r in results} == {"passed"}


def test_weights_beside_a_null_key_may_sum_to_less_than_one_but_not_to_more() -> None:
    class Doubled(NullSlotAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            result = super().attend(query, key, value, call)
            return result if result.weights is None else result._replace(weights=3 * result.weights)

    only = "weights_of_a_row_sum_to_one"
    assert not alarms(run_checks(NullSlotAttention, only=only, quick=True))
    assert alarms(run_checks(Doubled, only=only, quick=True))


def test_heads_that_talk_give_up_their_independence_and_need_to() -> None:
    only = "heads_are_independent"
    assert {r.status for r in run_checks(TalkingHeadsAttention, only=only)} == {"not applicable"}

    class Claims(TalkingHeadsAttention):
        capabilities = replace(TalkingHeadsAttention.capabilities, heads_independent=True)

    assert alarms(run_checks(Claims, only=only))


@pytest.mark.parametrize(
    ("variant", "given_up", "only"),
    [
        (SinkhornAttention, {"rows_independent": True}, "masks"),
        (DampedAttention, {"surrogate_gradient": False}, "gradients_match_finite_differences"),
        (RoundedAttention, {"approximation": 0.001}, "agrees_with_definition"),
        (SampledAttention, {"random": False, "deterministic": True}, "determinism"),
        (TextbookAttention, {"random": True, "deterministic": False}, "random_calls_draw_anew"),
    ],
)
def test_what_a_variant_gives_up_is_needed(variant: Any, given_up: dict[str, Any], only: str) -> None:
    claims = type("Claims", (variant,), {"capabilities": replace(variant.capabilities, **given_up)})
    assert alarms(run_checks(claims, only=only, quick=True))


@pytest.mark.parametrize("variant", [CausalSquareAttention, FixedWindowAttention, ShortDelta])
def test_checks_ask_a_variant_for_what_it_requires(variant: Any) -> None:
    results = run_checks(variant, only=["values", "gradients", "masks"], quick=True)
    assert not alarms(results)
    assert sum(r.status == "passed" for r in results) > 50


@pytest.mark.parametrize(("variant", "heads"), [(MultiQueryAttention, (None, 1)), (SingleHeadAttention, (1, 1))])
def test_a_variant_that_refuses_other_numbers_of_heads_is_tried_with_its_own(
    variant: type[Attention], heads: tuple[int | None, int | None]
) -> None:
    assert subject_of(variant).heads == heads
    results = run_checks(variant, only="agrees_with_definition", quick=True)
    assert not alarms(results)
    assert all(re.search(r"heads=(\d+/)?1 ", r.case) for r in results if r.case)


def test_a_size_may_be_refused_but_not_the_smallest() -> None:
    class RefusesAll(ProjectedLengthAttention):
        def supports(self, request: Request) -> list[Reason]:
            return [*super().supports(request), Reason("key_length", f"{request.key_length} keys", "none")]

    results = run_checks(ProjectedLengthAttention, only="agrees_with_definition")
    assert not alarms(results)
    assert any("refuses this size" in r.message for r in results if r.status == "not applicable")
    assert "declared and refused" in alarms(run_checks(RefusesAll, only="agrees_with_definition", quick=True))


def test_a_frozen_parameter_is_a_constant_of_the_gradient_checks() -> None:
    results = run_checks(RandomReluAttention, only="gradients_*", quick=True)
    assert not alarms(results)
    assert any(r.status == "passed" for r in results)


def test_nan_in_a_hidden_pair_is_followed_into_gradients_where_no_row_sees_it() -> None:
    class Leaks(SigmoidAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            return super().attend(query + 0 * key.sum(dim=2, keepdim=True), key, value, call)

    only = "hidden_nonfinite_pairs_are_isolated"
    assert not alarms(run_checks(SigmoidAttention, only=only, quick=True))
    assert alarms(run_checks(Leaks, only=only, quick=True))


def test_the_first_call_and_the_next_give_the_same_bits_in_float64() -> None:
    """The default scale is torch's own `1 / sqrt(Dk)`, so that every path of a variant rounds alike."""
    made = Float64Attention(num_heads=2, head_dim=6)
    query, key, value = (torch.randn(2, 2, 9, 6, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        first, second = (made(query, key, value).out for _ in range(2))
    assert torch.equal(first, second)
