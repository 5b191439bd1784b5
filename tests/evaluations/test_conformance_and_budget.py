"""Check results become a verdict; the budget shares seconds."""

from types import SimpleNamespace

import pytest

from attnlab import VariantUnavailable
from attnlab_evaluations.frame.budget import LEAST, TIMED, Budget
from attnlab_evaluations.frame.conformance import verdict_of

pytestmark = pytest.mark.no_torch


def results(*pairs):
    return [SimpleNamespace(check=check, status=status, message=f"{check} says") for check, status in pairs]


@pytest.mark.parametrize("status", ["passed", "refused", "not applicable"])
def test_a_variant_that_passes_may_be_measured(status):
    verdict = verdict_of("a", lambda *_, **__: results(("x", status)))
    assert verdict.may_be_measured
    assert (verdict.status, verdict.checks) == ("ok", 1)


@pytest.mark.parametrize("status", ["failed", "error"])
def test_a_failing_check_is_named_and_counts_once(status):
    verdict = verdict_of(
        "a", lambda *_, **__: results(("ok", "passed"), ("leak", status), ("leak", status), ("rows", status))
    )
    assert not verdict.may_be_measured
    assert (verdict.status, verdict.reason, verdict.message) == ("wrong", "leak and 1 more", "leak says")


def test_a_declared_failure_keeps_its_numbers_and_its_name():
    verdict = verdict_of("a", lambda *_, **__: results(("strides", "known failure"), ("rows", "passed")))
    assert verdict.may_be_measured
    assert verdict.known == ("strides",)


def test_a_variant_that_cannot_be_had_is_unsupported_with_the_reason():
    def missing(*_, **__):
        raise VariantUnavailable("a: needs triton")

    verdict = verdict_of("a", missing)
    assert (verdict.status, verdict.reason) == ("unsupported", "a: needs triton")


def test_quick_checks_are_asked_for_on_the_runs_device():
    seen = {}
    verdict_of("a", lambda name, **more: seen.update(name=name, **more) or [], device="cuda")
    assert seen == {"name": "a", "quick": True, "device": "cuda"}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_groups_share_by_weight_and_inherit_what_is_left():
    clock = Clock()
    budget = Budget(100.0, {"small": 1.0, "large": 3.0}, clock)
    assert budget.take("small") == pytest.approx(TIMED * 25.0)
    clock.now = 10.0
    assert budget.take("large") == pytest.approx(TIMED * 90.0)


def test_a_finished_group_gives_its_share_to_the_others():
    budget = Budget(100.0, {"done": 3.0, "open": 1.0}, Clock())
    budget.skip("done")
    assert budget.take("open") == pytest.approx(TIMED * 100.0)


def test_a_group_without_weight_still_gets_the_least():
    budget = Budget(100.0, {"open": 1.0}, Clock())
    assert budget.take("hopeless") == LEAST
    assert budget.take("open") == pytest.approx(TIMED * 100.0)


def test_no_group_starves_while_there_is_time_and_none_gets_time_after_it():
    clock = Clock()
    budget = Budget(10.0, {"tiny": 1e-9, "late": 1.0, "big": 1.0}, clock)
    assert budget.take("tiny") == LEAST
    clock.now = 11.0
    assert budget.take("late") == 0.0
