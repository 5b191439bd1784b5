"""Checks shared among processes: the same results in the same order, and a process that dies costs one check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.conformance import CheckResult, run_checks
from attnlab.conformance.running.sharing import Workers
from attnlab.errors import InvalidInput, PluginError, UnknownVariant
from attnlab_evaluations.suite_proof.correct import TextbookAttention

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
    shared = list(workers.iter_checks("dot_product", only=only, case=None, quick=True, device="cpu"))
    assert [_timeless(r) for r in shared] == [_timeless(r) for r in run_checks("dot_product", only=only, quick=True)]
    assert workers.why_unverified("dot_product") == ""
    with pytest.raises(UnknownVariant, match="there is no variant 'dot_produkt'"):
        list(workers.iter_checks("dot_produkt", only=None, case=None, quick=True, device="cpu"))
    with pytest.raises(InvalidInput, match="no check and no topic is called 'maskz'"):
        list(workers.iter_checks("dot_product", only=["maskz"], case=None, quick=True, device="cpu"))


def test_a_variant_that_ends_its_process_costs_the_checks_at_fault(workers: Workers) -> None:
    only = ["linear_in_value", "agrees_with_definition", "empty_sizes", "causality"]
    outcome = list(workers.iter_checks("crashing", only=only, case=None, quick=True, device="cpu"))
    ended = {r.check for r in outcome if r.status == "error"}
    assert "agrees_with_definition" in ended
    assert not {"empty_sizes", "causality"} & ended
    assert all("the process ended without a word" in r.message for r in outcome if not r.ok)
    with pytest.raises(PluginError, match="vanishing: the process ended without a word"):
        list(workers.iter_checks("vanishing", only=None, case=None, quick=True, device="cpu"))


def test_a_case_by_its_id_is_run_apart_too(workers: Workers) -> None:
    def one(case: str) -> list[CheckResult]:
        return list(workers.iter_checks("crashing", only=None, case=case, quick=True, device="cpu"))

    causal = one(
        "batch=2 heads=2 lengths=7/7 width=8 causal float32"
    )  # of which one asks about positions, which this variant reads none of
    assert {r.status for r in causal if r.check != "shift_invariance"} == {"passed"}
    (ended,) = one("batch=2 heads=2 lengths=7/7 width=8 sinks float32")
    assert (ended.status, ended.message[:32]) == ("error", "crashing: the process ended with")
    with pytest.raises(InvalidInput, match="no case of crashing is called 'no such case'"):
        one("no such case")


def test_a_check_goes_on_after_sys_exit() -> None:
    class Leaves(TextbookAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
            sys.exit(0)

    results = run_checks(Leaves, only="layout", quick=True)
    assert len(results) > 10
    ended = [r.message for r in results if r.status == "error"]
    assert len(ended) > 10
    assert "SystemExit where none was expected: 0" in ended[0]


PROGRAM = """
import sys, time
from attnlab.conformance.running.sharing import Workers
if __name__ == "__main__":
    with Workers(1) as workers:
        print(workers._submit(time.sleep, 0).result(), flush=True)
        print(*[child.pid for child in __import__("multiprocessing").active_children()], flush=True)
        workers._submit(time.sleep, 60).result()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals as POSIX has them")
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_asked(tmp_path: Path, ended_by: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    asking = subprocess.Popen(
        [sys.executable, tmp_path / "program.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert asking.stdout is not None
    assert asking.stdout.readline() == b"None\n"
    (child,) = map(int, asking.stdout.readline().split())
    asking.send_signal(ended_by)
    asking.communicate(timeout=20)  # which ends when the child has closed the pipe as well
    deadline = time.monotonic() + 20
    while _alive(child):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _timeless(result: CheckResult) -> CheckResult:
    return replace(result, seconds=0.0)
