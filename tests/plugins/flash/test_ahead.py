"""Kernels compiled for GPUs that are not there, and the table of tiles. Nothing here runs a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from attnlab.engines import SHARED_MEMORY
from attnlab_plugins.flash.configurations import KERNELS, configuration

ARCHITECTURES = (80, 86, 89, 90, 100, 120)


def compiled(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the records of `kernels_report`, in a process whose kernels are not interpreted."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed; its compiler needs no GPU (pip install triton==3.7.1 beside torch 2.13)")
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "attnlab_plugins.flash.kernels_report", "--json", "--jobs", "1", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.startswith("["), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.full
def test_the_kernels_of_a_training_step_compile_for_hopper_with_its_matrix_units() -> None:
    code, rows = compiled("--arch", "90", "--width", "64", "--call", "causal")
    assert code == 0
    assert [r["kernel"] for r in rows] == ["forward", "query_gradient", "key_gradient"]
    for r in rows:
        assert r["matrix"] > 0, r
        assert r["spills"] == 0, r


@pytest.mark.full
def test_a_gpu_with_little_shared_memory_is_given_no_more_than_it_has() -> None:
    code, rows = compiled("--arch", "86", "--width", "128", "--call", "bias")
    assert code == 0
    assert {r["kernel"] for r in rows} == set(KERNELS)
    assert all(r["shared"] <= 101_376 and r["spills"] == 0 for r in rows), rows


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_of_half_precision_spills_or_asks_for_too_much(arch: int) -> None:
    code, rows = compiled("--arch", str(arch), "--dtype", "bfloat16", "float16")
    broken = [r for r in rows if r["spills"] or r["shared"] > SHARED_MEMORY[arch]]
    assert not broken
    assert code == 0
    assert len(rows) > 100


@pytest.mark.full
def test_the_report_has_the_engines_kernels_beside_those_of_flash() -> None:
    code, rows = compiled("--arch", "90", "--width", "16", "--call", "additive", "causal")
    assert code == 0
    kernels = {r["case"]: {x["kernel"] for x in rows if x["case"] == r["case"]} for r in rows}
    assert kernels["additive"] == {"prepare", "scores", "gradient"}
    assert kernels["causal"] == {"forward", "query_gradient", "key_gradient"}


@pytest.mark.full
def test_an_interpreted_process_says_why_it_reports_nothing() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "attnlab_plugins.flash.kernels_report"],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_gpu_width_and_load_has_a_tile(kernel: str) -> None:
    for arch in (*ARCHITECTURES, 75, 87, 103, 121):
        for width in (16, 32, 64, 128, 256):
            for size in (2, 4):
                for load in range(4):
                    tile = configuration(kernel, arch, width, size, load)
                    assert min(tile.rows, tile.columns) >= 16, (arch, width, size, load)
                    assert tile.warps in (4, 8)


def test_heavier_calls_never_get_larger_tiles() -> None:
    for kernel in KERNELS:
        for arch in ARCHITECTURES:
            for width in (64, 128, 256):
                areas = [
                    tile.rows * tile.columns
                    for tile in (configuration(kernel, arch, width, 2, load) for load in range(4))
                ]
                assert areas == sorted(areas, reverse=True), (kernel, arch, width)
