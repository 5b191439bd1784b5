"""run_checks: what it takes, what it returns, and how it judges refusals, known failures and surprises."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, InvalidInput, KnownFailure, PluginError, Reason, Request, UnknownVariant
from attnlab.conformance import CheckResult, check_names, iter_checks, run_checks
from attnlab_evaluations.suite_proof.correct import TextbookAttention
from attnlab_evaluations.suite_proof.mutants.definition import ScaledByTheModelWidth, SubtractsNoMaximum
from attnlab_evaluations.suite_proof.mutants.refusals import SwallowsSoftcap


def statuses(results: list[CheckResult]) -> set[str]:
    return {r.status for r in results}


def test_a_name_a_class_and_an_instance_give_the_same_checks() -> None:
    only = "heads_are_independent"
    by_name = run_checks("dot_product", only=only)
    import attnlab

    made = attnlab.create("dot_product", num_heads=2, head_dim=16)
    by_class, by_instance = run_checks(type(made), only=only), run_checks(made, only=only)
    assert [r.case for r in by_name] == [r.case for r in by_class] == [r.case for r in by_instance]
    assert statuses(by_name + by_class + by_instance) == {"passed"}


def test_an_instance_is_checked_with_its_own_options_and_leaves_it_as_it_was() -> None:
    import attnlab

    made = attnlab.create("additive", num_heads=2, head_dim=8, hidden_size=3)
    before = {n: x.clone() for n, x in made.state_dict().items()}
    results = run_checks(made, only="agrees_with_definition", quick=True)
    assert all(r.ok for r in results), [r.message for r in results if not r.ok]
    assert all(torch.equal(x, before[n]) for n, x in made.state_dict().items())


def test_checks_do_not_disturb_the_random_state_of_the_caller() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run_checks(TextbookAttention, only="dropout", quick=True)
    assert torch.equal(torch.rand(3), expected)


def test_something_else_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidInput, match="registered name, an Attention class or an instance"):
        run_checks(3)


def test_an_unknown_variant_is_unknown() -> None:
    with pytest.raises(UnknownVariant, match="dot_product"):
        run_checks("dot_prodct")


def test_only_takes_checks_topics_and_patterns() -> None:
    assert {r.check for r in iter_checks(TextbookAttention, only="dead rows", quick=True)} == {
        "dead_rows_are_zero",
        "dead_rows_receive_no_gradient",
    }
    assert {r.check for r in iter_checks(TextbookAttention, only=["lse*", "train_and_eval_modes_agree"])} == {
        "lse_matches_definition",
        "train_and_eval_modes_agree",
    }


def test_an_unknown_check_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'dead_rows_are_zero'"):
        run_checks(TextbookAttention, only="dead_rows_are_zeros")


def test_a_result_carries_the_command_that_repeats_it() -> None:
    result = run_checks(TextbookAttention, only="train_and_eval_modes_agree")[0]
    assert shlex.split(result.repeat) == [
        *("attnlab", "check", "TextbookAttention", "--only", "train_and_eval_modes_agree"),
        *("--case", result.case),
    ]
    assert replace(result, device="cuda").repeat.endswith("--device cuda")


def test_names_of_checks_are_unique_and_their_functions_explain_themselves() -> None:
    from attnlab.conformance.running.plan import all_checks

    names = check_names()
    assert len(names) == len(set(names))
    for check in all_checks():
        assert check.function.__name__ == f"check_{check.name}"
        assert check.function.__doc__, check.name


def test_a_quick_run_covers_the_same_checks_with_fewer_cases() -> None:
    only = ["values", "masks"]
    quick, whole = (run_checks(TextbookAttention, only=only, quick=q) for q in (True, False))
    assert {r.check for r in quick} == {r.check for r in whole}
    assert len(quick) < len(whole)


# -- known failures -----------------------------------------------------------------------------------------------


class KnownToOverflow(SubtractsNoMaximum):
    known_failures: ClassVar = {"agrees_with_definition": KnownFailure("exp overflows, see the paper's appendix")}


class KnownWithoutReason(TextbookAttention):
    known_failures: ClassVar = {"agrees_with_definition": KnownFailure("was true once")}


class KnownByAnotherName(TextbookAttention):
    known_failures: ClassVar = {"agree_with_definitions": KnownFailure("a slip")}


def test_a_known_failure_is_reported_with_its_reason_and_lets_the_variant_pass() -> None:
    results = run_checks(KnownToOverflow, only="agrees_with_definition")
    known = [r for r in results if r.status == "known failure"]
    assert known
    assert all(r.ok for r in results)
    assert known[0].message.startswith("exp overflows, see the paper's appendix: KnownToOverflow (")


@pytest.mark.parametrize("quick", [True, False])
def test_a_known_failure_that_passes_is_a_failure(quick: bool) -> None:
    results = run_checks(KnownWithoutReason, only="agrees_with_definition", quick=quick)
    last = results[-1]
    assert last.status == "failed"
    assert "is declared a KnownFailure (was true once) and passes on every case. Remove the declaration" in last.message


def test_a_known_failure_of_an_unknown_check_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        PluginError, match="'agree_with_definitions', which is no check; did you mean 'agrees_with_definition'"
    ):
        run_checks(KnownByAnotherName, only="train_and_eval_modes_agree")


def test_a_known_failure_of_another_exception_does_not_cover_an_assertion() -> None:
    class Covers(SubtractsNoMaximum):
        known_failures: ClassVar = {"agrees_with_definition": KnownFailure("crashes", raises=RuntimeError)}

    assert "failed" in statuses(run_checks(Covers, only="agrees_with_definition"))


# -- refusals and surprises ---------------------------------------------------------------------------------------


def test_undeclared_askables_come_back_as_refused() -> None:
    results = run_checks("flash", only="undeclared_features_are_refused")
    refused = {r.case for r in results if r.status == "refused"}
    assert any("weights" in case for case in refused), [r.message for r in results]


def test_an_undeclared_argument_that_is_swallowed_is_named() -> None:
    results = run_checks(SwallowsSoftcap, only="undeclared_features_are_refused")
    (failed,) = [r for r in results if r.status == "failed" and "softcap" in r.case]
    assert "softcap= was accepted although `softcap` is not declared" in failed.message


def test_a_declared_askable_that_is_refused_alone_fails() -> None:
    class RefusesCausal(TextbookAttention):
        def supports(self, request: Request) -> list[Reason]:
            more = [Reason("causal", "causal=True", "no")] if request.asks("causal") else []
            return super().supports(request) + more

    bad = [r for r in run_checks(RefusesCausal, only="agrees_with_definition", quick=True) if r.status == "failed"]
    assert bad
    assert "causal is declared and refused" in bad[0].message


def test_a_refused_combination_of_declared_askables_is_not_applicable() -> None:
    class RefusesBoth(TextbookAttention):
        def supports(self, request: Request) -> list[Reason]:
            both = request.asks("causal") and request.asks("gqa")
            return super().supports(request) + ([Reason("gqa", "gqa with causal", "one of them")] if both else [])

    results = run_checks(RefusesBoth, only="grouped_heads_equal_repeated_heads")
    assert "gqa with causal" in next(r.message for r in results if r.status == "not applicable")
    assert all(r.ok for r in results)


def test_an_unexpected_exception_becomes_one_sentence() -> None:
    class Breaks(TextbookAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            raise KeyError("no\nsuch thing")

    results = run_checks(Breaks, only="train_and_eval_modes_agree")
    assert statuses(results) == {"error"}
    assert not results[0].ok
    assert "\n" not in results[0].message
    assert "KeyError where none was expected: 'no\\nsuch thing', at test_runner.py:" in results[0].message


def test_an_interrupt_is_not_swallowed() -> None:
    class Interrupted(TextbookAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_checks(Interrupted, only="train_and_eval_modes_agree")


def test_a_check_that_needs_what_is_not_declared_says_so_once() -> None:
    results = run_checks("linearised", only="lse_matches_definition")
    assert [(r.status, r.case) for r in results] == [("not applicable", "")]
    assert "does not declare" in results[0].message


# -- messages -----------------------------------------------------------------------------------------------------


def test_a_failure_says_who_where_what_how_far_and_why() -> None:
    failed = next(r for r in run_checks(ScaledByTheModelWidth, only="agrees_with_definition", quick=True) if not r.ok)
    for part in (
        "ScaledByTheModelWidth (batch=1 heads=2 lengths=2/2 width=4 float32): ",
        "out differs from the float64 definition at [b=",
        ", i=",
        "got ",
        "expected ",
        "> bound ",
        "the plain formula's error in float32",
        "rounding over",
        " elements are outside. ",
        "the scale is ",
    ):
        assert part in failed.message, failed.message


def test_the_textbook_module_with_minus_1e9_fails_by_name_of_dead_rows_and_half_precision() -> None:
    class MaskedFill(TextbookAttention):
        """scores.masked_fill(mask == 0, -1e9), computed in the dtype of the inputs."""

        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            answer = super().attend(query, key, value, call)
            scores = query @ self.grouped(key).transpose(-1, -2) / self.key_dim**0.5
            if call.visibility is not None:
                scores = scores.masked_fill(call.visibility.dense() == 0, -1e9)
            weights = torch.softmax(scores, dim=-1)
            return answer._replace(out=weights @ self.grouped(value))

    results = run_checks(MaskedFill, only="dead_rows_are_zero")
    messages = " ".join(r.message for r in results if not r.ok)
    assert "a dead row's out must be exactly 0 (the query sees no key)" in messages
    assert "float16" in messages
    assert "value cannot be converted to type" in messages  # -1e9 has no half
