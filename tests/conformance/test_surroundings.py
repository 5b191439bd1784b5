"""Checks of threads, devices, settings and transforms: what is safe passes, what is not is told, the process is left as it was."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.conformance import CheckResult, run_checks
from attnlab.conformance.checks._settings import SETTINGS
from attnlab.conformance.checks.threads import _taking_turns
from attnlab_evaluations.suite_proof.correct import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.mutants.gradients import NoGradientWithoutTheQuerys
from attnlab_evaluations.suite_proof.mutants.settings import LowersThePrecision, UnusedSlotsAreMultipliedByZero
from attnlab_evaluations.suite_proof.mutants.threads import KeepsItsAnswerOnItself, SharesAScratchBuffer
from attnlab_evaluations.suite_proof.mutants.transforms import LearnedTextbook

TOPICS = ["threads", "devices", "settings", "transforms", "gradients_do_not_depend_on_requires_grad_of_others"]


def told(results: list[CheckResult]) -> str:
    return "\n".join(f"{r.check} [{r.case}]: {r.message}" for r in results if not r.ok)


@pytest.mark.parametrize("variant", [LearnedTextbook, TextbookLinear])
def test_correct_variants_pass_whatever_surrounds_them(variant: Any) -> None:
    results = run_checks(variant, only=TOPICS)
    assert all(r.ok for r in results), told(results)


# -- threads ------------------------------------------------------------------------------------------------------


def test_two_threads_take_turns_at_every_operation() -> None:
    order: list[int] = []

    def job(me: int) -> Any:
        def work() -> Any:
            x = torch.zeros(())
            for _ in range(5):
                order.append(me)
                x = x + 1
            return x, {}

        return work

    first, second = _taking_turns([job(0), job(1)], files=set())
    assert not isinstance(first, Exception)
    assert not isinstance(second, Exception)
    assert (float(first[0]), float(second[0])) == (5.0, 5.0)
    assert sorted(order) == [0] * 5 + [1] * 5
    assert sum(a != b for a, b in pairwise(order)) >= 8


def test_what_lies_on_the_module_between_two_lines_is_found() -> None:
    failed = [
        r for r in run_checks(KeepsItsAnswerOnItself, only="concurrent_calls_are_independent", quick=True) if not r.ok
    ]
    assert failed
    assert "beside another call in another thread" in failed[0].message or "the call alone" in failed[0].message
    assert "Keep nothing of a call on the module" in failed[0].message


def test_a_lock_around_what_is_shared_is_enough_and_stops_nothing() -> None:
    class Locked(SharesAScratchBuffer):
        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.lock = threading.Lock()

        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            with self.lock:
                return super().attend(query, key, value, call)

    results = run_checks(Locked, only="concurrent_calls_are_independent", quick=True)
    assert [r.status for r in results] == ["passed"], told(results)


# -- settings -----------------------------------------------------------------------------------------------------


def test_settings_and_random_numbers_of_the_process_are_as_before_also_where_a_variant_changes_them() -> None:
    before = {name: read() for name, read in SETTINGS.items()}
    torch.manual_seed(8)
    expected = torch.rand(3)
    torch.manual_seed(8)
    run_checks(TextbookAttention, only=TOPICS, quick=True)
    (result,) = run_checks(LowersThePrecision, only="calls_do_not_change_global_settings", quick=True)
    assert "the precision of float32 products (from highest to high)" in result.message
    assert torch.equal(torch.rand(3), expected)
    assert {name: read() for name, read in SETTINGS.items()} == before


@pytest.mark.parametrize("claimed", [True, False])
def test_deterministic_mode_may_be_refused_by_variants_that_do_not_claim_it(claimed: bool) -> None:
    class Refuses(TextbookAttention):
        capabilities = replace(TextbookAttention.capabilities, deterministic=claimed)

        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            if torch.are_deterministic_algorithms_enabled():
                raise RuntimeError("this kernel adds atomically and has no deterministic implementation")
            return super().attend(query, key, value, call)

    results = run_checks(Refuses, only="deterministic_mode_is_honoured", quick=True)
    assert all(r.ok for r in results) is not claimed
    if claimed:
        assert "`deterministic` is claimed, and deterministic mode refuses it: this kernel" in results[0].message


def test_unused_slots_of_a_store_are_found_by_what_fresh_memory_holds() -> None:
    failed = [r for r in run_checks(UnusedSlotsAreMultipliedByZero, only="settings") if not r.ok]
    assert [r.check for r in failed] == ["deterministic_mode_is_honoured"], told(failed)
    assert "got nan" in failed[0].message
    assert "unused slots of a state must stay out of sums" in failed[0].message


# -- transforms ---------------------------------------------------------------------------------------------------


def test_what_torch_cannot_transform_is_not_judged_and_says_why() -> None:
    results = run_checks(NoGradientWithoutTheQuerys, only="functional_gradients_agree")
    assert {r.status for r in results} == {"not applicable"}
    assert "torch.func cannot transform it: " in results[0].message
    assert "setup_context" in results[0].message


def test_a_variant_without_parameters_has_none_to_be_given_others() -> None:
    results = run_checks(TextbookAttention, only="parameters_are_read_at_each_call", quick=True)
    assert [(r.status, r.message) for r in results] == [("not applicable", "it has no parameters")]
