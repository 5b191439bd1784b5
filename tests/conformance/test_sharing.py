"""Checks shared among processes: the same results in the same order, and a process that dies costs one check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attnlab.conformance import CheckResult, run_checks
from attnlab.conformance.sharing import Workers
from attnlab.errors import InvalidInput, PluginError, UnknownVariant

CRASHING = """
import os
from attnlab_plugins.dot_product import DotProductAttention

class Crashing(DotProductAttention):
    def attend(self, query, key, value, call):
        if call.sinks is not None:
            os._exit(11)  # as a segmentation fault does
        return super().attend(query, key, value, call)
"""
ROWS = """version: 1
variants:
  crashing: {target: 'crashing_variant:Crashing', summary: ends the process}
  vanishing: {target: 'vanishing_variant:Vanishing', summary: ends the process on import}
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    (tmp_path / "crashing_variant.py").write_text(CRASHING, encoding="utf-8")
    (tmp_path / "vanishing_variant.py").write_text("import os; os._exit(11)", encoding="utf-8")
    (tmp_path / "rows.yaml").write_text(ROWS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ATTNLAB_REGISTRY", str(tmp_path / "rows.yaml"))
    with Workers(2) as made:
        yield made


def test_shared_checks_are_those_of_one_process_in_its_order(workers: Workers) -> None:
    only = ["refusals", "dead rows", "layout"]
    shared = list(workers.iter_checks("dot_product", only=only, quick=True, device="cpu"))
    assert [_timeless(r) for r in shared] == [
        _timeless(r) for r in run_checks("dot_product", only=only, quick=True)
    ]
    assert workers.why_unverified("dot_product") == ""
    with pytest.raises(UnknownVariant, match="there is no variant 'dot_produkt'"):
        list(workers.iter_checks("dot_produkt", only=None, quick=True, device="cpu"))
    with pytest.raises(InvalidInput, match="no check and no topic is called 'maskz'"):
        list(workers.iter_checks("dot_product", only=["maskz"], quick=True, device="cpu"))


def test_a_variant_that_ends_its_process_costs_the_checks_at_fault(workers: Workers) -> None:
    only = ["linear_in_value", "agrees_at_the_ends_of_arguments", "empty_sizes", "the_future_leaves_the_past"]
    found = list(workers.iter_checks("crashing", only=only, quick=True, device="cpu"))
    ended = {r.check for r in found if r.status == "error"}
    assert "agrees_at_the_ends_of_arguments" in ended
    assert not {"empty_sizes", "the_future_leaves_the_past"} & ended
    assert all("the process ended without a word" in r.message for r in found if not r.ok)
    with pytest.raises(PluginError, match="vanishing: the process ended without a word"):
        list(workers.iter_checks("vanishing", only=None, quick=True, device="cpu"))


def _timeless(result: CheckResult) -> CheckResult:
    return replace(result, seconds=0.0)
