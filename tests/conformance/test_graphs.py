"""Checks of compilers, exporters and memory: correct claims pass, false ones are told whole, and torch is left as it was."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import replace

import pytest

from attnlab import Reason, Request
from attnlab.conformance import CheckResult, run_checks
from attnlab.interface import Attention
from attnlab_evaluations.suite_proof.correct import TextbookDelta
from attnlab_evaluations.suite_proof.mutants._shared import CompilingTextbook
from attnlab_evaluations.suite_proof.mutants.graphs import (
    ClaimsToCompile,
    CompilingLinear,
    KeepsThePositionOnTheModule,
    ListsItsPositions,
)
from attnlab_evaluations.suite_proof.mutants.memory import BlocksAreNotRecomputed


class ExportingDelta(TextbookDelta):
    """Correct; its program holds every token, so it is one of its length."""

    capabilities = replace(TextbookDelta.capabilities, exports=True)


def told(results: list[CheckResult]) -> str:
    return "\n".join(f"{r.check} [{r.case}]: {r.message}" for r in results if not r.ok)


@pytest.mark.parametrize(
    "variant",
    [CompilingLinear, *(pytest.param(v, marks=pytest.mark.full) for v in (CompilingTextbook, ExportingDelta))],
)
def test_correct_variants_that_claim_to_be_captured_pass(variant: type[Attention]) -> None:
    results = run_checks(variant, only=["graphs", "exports"])
    assert all(r.ok for r in results), told(results)
    assert any(r.status == "passed" for r in results)


def test_a_variant_that_unrolls_its_tokens_may_export_without_serving_other_lengths() -> None:
    (result,) = run_checks(ExportingDelta, only="exported_programs_serve_other_lengths")
    assert (result.status, result.message) == ("not applicable", "it does not claim compiles")


def test_a_quick_run_says_what_it_leaves_out() -> None:
    (result,) = run_checks(CompilingLinear, only="compiled_gradients_agree", quick=True)
    assert (result.status, result.message) == ("not applicable", "a quick run leaves it out")


def test_a_combination_that_is_refused_is_refused_before_it_is_compiled() -> None:
    class RefusesBoth(CompilingTextbook):
        def supports(self, request: Request) -> list[Reason]:
            both = request.asks("causal") and request.asks("gqa")
            return super().supports(request) + ([Reason("gqa", "gqa with causal", "one")] if both else [])

    results = run_checks(RefusesBoth, only="compiles_without_a_graph_break")
    assert {r.status for r in results} == {"not applicable"}
    assert "gqa with causal" in results[0].message


def test_a_capture_that_fails_is_told_by_its_exception_and_what_to_do() -> None:
    failed = [r for r in run_checks(ClaimsToCompile, only="compiles_without_a_graph_break") if not r.ok]
    assert failed
    for part in (
        "ClaimsToCompile (batch=2 heads=4/2 lengths=5/9 width=8 causal gqa longer_keys float32): ",
        "torch.compile(fullgraph=True) failed: ",
        "Drop the claim `compiles`",
    ):
        assert part in failed[0].message


def test_too_many_graphs_are_told_with_the_lengths_that_took_them() -> None:
    failed = [r for r in run_checks(ListsItsPositions, only="compiled_graphs_are_reused") if not r.ok]
    assert "lengths 41, 43, 45 took 3 graphs, at most 2 are allowed" in failed[0].message


def test_a_position_on_the_module_is_right_until_it_is_compiled() -> None:
    results = run_checks(KeepsThePositionOnTheModule, only="chunked_decoding_equals_full_attention", quick=True)
    assert all(r.ok for r in results), told(results)


def test_blocks_that_are_small_one_by_one_are_not_so_all_told() -> None:
    results = run_checks(BlocksAreNotRecomputed, only="linear_memory_of_intermediates")
    assert all(r.ok for r in results), told(results)
    failed = [r for r in run_checks(BlocksAreNotRecomputed, only="linear_memory_saved_for_backward") if not r.ok]
    assert "what is kept for the backward grows from" in failed[0].message


def test_what_torch_says_about_itself_is_not_shown_and_its_settings_are_as_before(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = logging.root.manager.disable, list(warnings.filters), sys.stderr
    run_checks(ClaimsToCompile, only="graphs")
    assert (logging.root.manager.disable, list(warnings.filters), sys.stderr) == before
    assert capfd.readouterr().err == ""
