"""The conformance suite with the kernels in place of torch's."""

from __future__ import annotations

from typing import Any

import pytest

from attnlab import run_checks
from attnlab.conformance import CheckResult

SOME = (
    "dead_rows_are_zero",
    "dropout_is_seeded",
    "outputs_own_their_memory",
    "compiles_without_a_graph_break",
    "refusals",
)
ELSEWHERE = "registry_row_agrees_with_class"  # the row states what flash can without a GPU


def wrong(results: list[CheckResult]) -> str:
    return "\n".join(
        f"{r.status} {r.check} [{r.case}]: {r.message}" for r in results if not r.ok and r.check != ELSEWHERE
    )


def test_the_kernels_pass_a_choice_of_checks(make: Any) -> None:
    results = run_checks(make, only=SOME, quick=True)
    assert not wrong(results), wrong(results)
    assert sum(r.status == "passed" for r in results) > 20


@pytest.mark.full
def test_the_kernels_pass_the_quick_checks(make: Any) -> None:
    results = run_checks(make, quick=True)
    assert not wrong(results), wrong(results)
    assert sum(r.status == "passed" for r in results) > 400
