"""Faults of the suite itself: right variants that were accused, and messages that named another cause than the true one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.conformance import CheckResult, draw, run_checks
from attnlab.conformance.compare.messages import index_of
from attnlab.conformance.oracle.cases import case
from attnlab.conformance.oracle.features import FEATURES
from attnlab_evaluations.suite_proof.correct import TextbookAttention
from attnlab_evaluations.suite_proof.correct.fixed import (
    FixedGaussianAttention,
    ProjectedValuesAttention,
    RandomSynthesizerAttention,
    RateByGroupAttention,
    ValueEmbeddingAttention,
)


def judged(variant: Any, *only: str, quick: bool = True) -> list[CheckResult]:
    return run_checks(variant, only=only or None, quick=quick)


def told(results: list[CheckResult]) -> str:
    return "\n".join(f"{r.check} [{r.case}]: {r.message}" for r in results if not r.ok)


def test_arguments_with_an_item_or_head_axis_are_drawn_with_values_that_differ_along_it() -> None:  # F09
    made = TextbookAttention(num_heads=3, head_dim=8)
    sizes: dict[str, Any] = {"batch": 3, "num_heads": 3, "num_kv_heads": 3}
    along: dict[str, tuple[int, ...]] = {
        "mask_per_item": (0,),
        "mask_per_head": (1,),
        "mask_of_each": (0, 1),
        "bias": (1,),
        "bias_per_key": (0,),
        "bias_of_each": (0, 1),
        "hiding_bias": (1,),
        "sinks": (0,),
        "key_mask_left": (0,),
        "key_mask_holes": (0,),
        "key_lengths": (0,),
        "query_lengths": (0,),
        "batch_offset": (0,),
    }
    for label, axes in along.items():
        arguments = draw(case(label, **sizes), made).arguments
        x = arguments[FEATURES[label].sets[-1]]
        for axis in axes:
            assert not torch.equal(x.select(axis, 0), x.select(axis, 1)), (label, axis)


def test_weights_of_parameters_alone_have_their_gradient_checked() -> None:  # F14
    class Detached(RandomSynthesizerAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            answer = super().attend(query, key, value, call)
            return (
                answer
                if answer.weights is None
                else answer._replace(weights=2 * answer.weights - answer.weights.detach())
            )

    only = "gradients_flow_through_weights"
    assert not told(judged(RandomSynthesizerAttention, only))
    assert "gradient through weights of R" in told(judged(Detached, only))
    results = judged(FixedGaussianAttention, only)  # a bias alone moves its weights
    assert {r.status for r in results} == {"not applicable", "passed"}


def test_projections_after_the_weights_and_embeddings_of_values_are_normalised_all_the_same() -> None:
    for variant in (ProjectedValuesAttention, ValueEmbeddingAttention):
        assert not told(judged(variant, "laws", "dropout", "weights", "long_sums_accumulate_in_float32"))


def test_an_lse_wider_than_an_empty_piece_has_is_compared() -> None:
    assert not told(judged(ProjectedValuesAttention, "packed_rows_equal_separate_calls", quick=False))


def test_constants_of_a_group_do_not_count_as_a_wrong_grouping() -> None:
    results = judged(RateByGroupAttention, "grouped_heads_equal_repeated_heads")
    assert {r.status for r in results} == {"not applicable"}
    assert "depends on the number of key/value heads" in results[0].message


class Approximates(TextbookAttention):
    """Takes no step to say that it only approximates softmax."""

    capabilities = replace(TextbookAttention.capabilities, exact=False)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return 1.02 * super().scores(q, k, call)


def test_not_claiming_exact_without_a_reason_is_told_once_and_not_by_every_check() -> None:
    failed = [r for r in judged(Approximates) if not r.ok]
    assert {r.check for r in failed} <= {"agrees_with_definition", "scale_zero_gives_the_mean"} | {
        r.check for r in failed if r.topic in ("golden", "weights")
    }
    assert 0 < len(failed) < 20, told(failed)
    assert "approximation=" in failed[0].message


def test_an_index_counts_rows_and_not_the_rows_that_were_looked_at() -> None:
    assert index_of("out", 1 * 8 + 3, torch.Size([1, 1, 4, 8]), [0, 63, 64, 900]) == "[b=0, h=0, i=63, d=3]"


def test_a_message_tells_what_the_formula_hides_from_what_the_call_hides() -> None:
    from attnlab.catalogue import default_registry

    class OneKeyTooFew(default_registry().variant_class("sliding_window")):  # type: ignore[misc]
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            answer = super().attend(query, key, value, call)
            return answer._replace(out=answer.out * 1.5)

    message = told(judged(OneKeyTooFew(num_heads=2, head_dim=8, left=2), "agrees_with_definition"))
    assert "by the call's masks this query sees keys" in message
    assert "the formula gives weight to key" in message


def test_advice_on_precision_is_given_for_faults_of_precision_only() -> None:
    class ForgetsMasks(TextbookAttention):
        def visible(self, call: Call, shape: Any, device: Any) -> Tensor:
            return torch.ones(shape, dtype=torch.bool)

    message = next(r.message for r in judged(ForgetsMasks, "scores_may_exceed_half_precision") if not r.ok)
    assert "It is no matter of precision" in message
    assert "float32; a fill" not in message


def test_advice_on_a_mask_names_the_rule_that_was_asked_for() -> None:
    class Exclusive(TextbookAttention):
        def visible(self, call: Call, shape: Any, device: Any) -> Tensor:
            seen = call.visibility
            if seen is not None and seen.left:
                seen.left -= 1
            return super().visible(call, shape, device)

    failed = [r for r in judged(Exclusive, "agrees_with_definition") if not r.ok]
    assert all("both counts include their end" in r.message for r in failed)
