"""The engines' Triton kernels compiled for GPUs that are not there, and what the report calls a fault. Nothing here runs a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from attnlab.engines import SHARED_MEMORY

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton is not installed; its compiler needs no GPU (pip install triton==3.7.1 beside torch 2.13)",
    ),
]


def compiled(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the records of the report, in a process whose kernels are not interpreted."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "attnlab.engines.triton_report", "--json", "--jobs", "1", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.startswith("["), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


def test_the_kernels_of_a_training_step_compile_for_hopper() -> None:
    code, rows = compiled("--arch", "90", "--width", "40", "--call", "additive")
    assert code == 0
    assert {r["kernel"] for r in rows} == {"prepare", "scores", "gradient"}
    assert all(r["registers"] > 16 for r in rows)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_no_kernel_of_half_precision_spills_or_asks_for_too_much(arch: int) -> None:
    asked = ("--arch", str(arch), "--call", "additive", "--dtype", "bfloat16", "float16", "--width", "1", "64")
    code, rows = compiled(*asked)
    assert code == 0
    assert len(rows) >= 20
    assert not [r for r in rows if r["spills"] or r["stack"] or r["shared"] > SHARED_MEMORY[arch]]


@pytest.mark.parametrize(
    ("call", "kernels"),
    [("recurrence", ("forward", "backward")), ("correction", ("solve", "forward", "backward"))],
    ids=["sum", "correction"],
)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_no_kernel_of_recurrences_spills_or_asks_for_too_much_in_float32(
    arch: int, call: str, kernels: tuple[str, ...]
) -> None:
    code, rows = compiled("--arch", str(arch), "--call", call, "--dtype", "float32", "--width", "64", "128")
    assert code == 0
    assert [(r["width"], r["kernel"]) for r in rows] == [(w, k) for w in (64, 128) for k in kernels]
    assert not [r for r in rows if r["spills"] or r["stack"] or r["shared"] > min(SHARED_MEMORY.values())]


@pytest.mark.parametrize("width", [1, 40, 256])
def test_kernels_of_recurrences_compile_without_decays_and_without_queries(width: int) -> None:
    sums = ("recurrence", "recurrence sums", "recurrence normalised", "recurrence state")
    corrections = ("correction", "correction alone", "correction state")
    code, rows = compiled("--arch", "90", "--call", *sums, *corrections, "--width", str(width))
    assert code == 0
    assert len(rows) == 2 * len(sums) + 3 * len(corrections)


def test_a_kernel_compiled_twice_has_the_worse_of_each_figure(interpreter: None) -> None:
    from attnlab.engines.triton_report import Row

    tile = (32, 16, 4, 1)
    one = Row(90, "float32", 64, "recurrence", "forward", tile, 80, 8, 1000, 2, 4)
    other = Row(90, "float32", 64, "recurrence", "forward", tile, 90, 0, 2000, 1, 3)
    worse = Row(90, "float32", 64, "recurrence", "forward", tile, 90, 8, 2000, 2, 3)
    assert one.or_worse(other) == other.or_worse(one) == worse


def test_each_broken_limit_is_a_fault(interpreter: None) -> None:  # kernels stay interpreted for the tests that follow
    from attnlab.engines.triton_report import Row

    def faults(**changed: Any) -> list[str]:
        usual: dict[str, Any] = {"arch": 86, "dtype": "bfloat16", "width": 64, "case": "additive", "kernel": "scores"}
        usual |= {"tile": (64, 64, 4, 1), "registers": 80, "stack": 0, "shared": 0, "spills": 0, "matrix": 0}
        return list(Row(**{**usual, **changed}).faults())

    assert faults() == []
    assert faults(spills=3) == ["3 spills"]
    assert faults(spills=3, dtype="float32") == []
    assert faults(shared=101_377) == ["101377 bytes of shared memory, 101376 are there"]
    assert faults(must_have_matrix=True) == ["no HGMMA"]
    assert faults(must_have_matrix=True, matrix=4) == []
