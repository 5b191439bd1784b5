"""`attnlab gpu-check` without a GPU: FLOPs, plan, resuming, faults, time, refusals; and its cells for real on the CPU."""

import functools
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from attnlab import InvalidInput, PluginError
from attnlab.cli import main
from attnlab_evaluations.frame import provenance
from attnlab_evaluations.tasks.gpu import run as gpu_check
from attnlab_evaluations.tasks.gpu import speed as gpu_speed
from attnlab_evaluations.tasks.gpu.settings import BUDGET, GpuSettings
from attnlab_evaluations.tasks.gpu.speed import Cell

NAMES = ("flash", "dot_product", "linearised")
SECONDS = {"median": 1e-3, "low": 1e-3, "high": 1e-3}


def cell(**given):
    return Cell(**{"variant": "flash", "batch": 1, "heads": 2, "length": 100, "width": 8, "causal": False,
                   "phase": "forward", **given})  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def gpu(monkeypatch, machine, tmp_path):
    """A run on the CPU with stubbed checks and cells, which it counts; `gpu(...)` gives the exit code."""
    monkeypatch.setattr(provenance, "collect", lambda _: dict(machine))
    seen = SimpleNamespace(checks=[], cells=[], clock=Clock(), out=tmp_path / "run")

    def checker(name, *, quick, device):
        assert quick
        seen.checks.append(name)
        yield SimpleNamespace(check="fine", status="passed", message="")

    def runner(one, device, seconds):
        seen.cells.append((one.variant, one.phase))
        mine = {"status": "ok", "seconds": SECONDS, "tflops": one.tflops(1e-3)}
        return "ok", "", {"calls": {"attnlab": mine}, "ratio": None}

    def run(*, checks=checker, cells=runner, budget=100.0, names=NAMES):
        settings = GpuSettings(names, seen.out, device="cpu", budget=budget)
        return gpu_check.run_gpu_check(settings, checker=checks, cell_runner=cells, clock=seen.clock)

    run.seen = seen
    return run


def test_flops_are_those_of_the_stated_formulas():
    full = 4 * 1 * 2 * 100 * 100 * 8
    assert full == 640_000
    assert cell().flops == full
    assert cell(causal=True).flops == full / 2
    assert cell(phase="forward_backward").flops == 3.5 * full
    assert cell(causal=True, window=3).flops == 4 * 1 * 2 * 100 * 3 * 8
    assert cell(causal=True, window=256).flops == full / 2
    assert cell().tflops(1e-6) == pytest.approx(0.64)


def test_the_plan_has_every_shape_at_equal_tokens_and_a_window_once():
    made = gpu_speed.plan(["flash", "dot_product", "sliding_window"], "cuda")
    assert len(made) == len(set(made)) == 2 * 24 + 12
    assert {one.batch * one.length for one in made} == {16384}
    assert {(one.causal, one.window) for one in made if one.variant == "sliding_window"} == {(True, 256)}
    assert [one.length for one in made] == sorted(one.length for one in made)
    assert len(gpu_speed.plan(["flash"], "cpu")) == 2


def test_a_run_leaves_records_and_a_summary_and_a_second_one_repeats_nothing(gpu, records, capsys):
    assert gpu() == 0
    first = records(gpu.seen.out)
    assert gpu.seen.checks == list(NAMES)
    assert gpu.seen.cells == [(n, p) for n in ("flash", "dot_product") for p in ("forward", "forward_backward")]
    assert [r["metric"] for r in first] == ["conformance"] * 3 + ["speed"] * 4
    assert "attnlab TFLOP/s" in capsys.readouterr().out
    assert gpu() == 0
    assert (len(gpu.seen.checks), len(gpu.seen.cells)) == (3, 4)
    assert records(gpu.seen.out) == first
    summary = json.loads((gpu.seen.out / "gpu-check.json").read_text(encoding="utf-8"))
    assert [len(summary[part]) for part in ("conformance", "speed")] == [3, 4]
    assert str(gpu.seen.out) not in json.dumps(summary)


def test_checks_that_raise_or_fail_are_recorded_and_the_run_goes_on_with_exit_code_1(gpu, records, capsys):
    def checks(name, *, quick, device):
        if name == "flash":
            raise RuntimeError("the kernel\nhas gone")
        yield SimpleNamespace(check="leak", status="failed" if name == "linearised" else "passed", message="it leaks")

    assert gpu(checks=checks) == 1
    found = {r["variant"]: (r["status"], r["detail"]) for r in records(gpu.seen.out) if r["metric"] == "conformance"}
    assert found["flash"] == ("wrong", "RuntimeError: the kernel has gone")
    assert found["linearised"] == ("wrong", "leak")
    assert found["dot_product"] == ("ok", "")
    assert {name for name, _ in gpu.seen.cells} == {"dot_product"}  # no numbers for what is wrong
    out = capsys.readouterr().out
    assert "linearised: it leaks" in out
    assert "RuntimeError: the kernel has gone" in out


def test_a_cell_that_raises_is_recorded_and_the_others_follow_with_exit_code_1(gpu, records):
    def cells(one, device, seconds):
        gpu.seen.cells.append(one)
        if one.variant == "flash":
            raise ValueError("no such shape")
        return "unsupported", "refused", {}

    assert gpu(cells=cells) == 1
    assert len(gpu.seen.cells) == 4
    found = [(r["status"], r["detail"]) for r in records(gpu.seen.out) if r["metric"] == "speed"]
    assert found == [("wrong", "ValueError: no such shape")] * 2 + [("unsupported", "refused")] * 2


def test_after_a_fault_that_ruins_the_device_the_other_cells_wait_for_the_next_run(gpu, monkeypatch, capsys):
    def cells(one, device, seconds):
        gpu.seen.cells.append(one)
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(gpu_check._Run, "_usable", lambda self: False)
    assert gpu(cells=cells) == 1
    assert len(gpu.seen.cells) == 1
    assert "go on with what is missing: attnlab gpu-check --out" in capsys.readouterr().out


def test_what_had_no_time_says_so_and_is_done_by_the_next_run(gpu, records, capsys):
    def slow(name, *, quick, device):
        gpu.seen.checks.append(name)
        gpu.seen.clock.now += 30.0
        yield SimpleNamespace(check="fine", status="passed", message="")

    def cells(one, device, seconds):
        gpu.seen.cells.append(one)
        gpu.seen.clock.now += 25.0
        return "ok", "", {}

    assert gpu(checks=slow, cells=cells) == 1  # 30 s of 50 for one variant; then 40 s for cells of 25 s
    said = [(r["status"], r["detail"]) for r in records(gpu.seen.out)]
    assert said == [("ok", "")] + [("over budget", "no time left")] * 2 + [("ok", "")] + [
        ("over budget", "no time left")
    ]
    assert "no time left" in capsys.readouterr().out
    assert gpu() == 0
    assert gpu.seen.checks == ["flash", "dot_product", "dot_product", "linearised"]
    assert len(gpu.seen.cells) == 1 + 3


def test_a_failure_that_was_found_before_the_time_ended_counts(gpu, records):
    def checks(name, *, quick, device):
        yield SimpleNamespace(check="leak", status="failed", message="it leaks")
        gpu.seen.clock.now += 60.0
        yield SimpleNamespace(check="fine", status="passed", message="")

    assert gpu(checks=checks, names=("flash",)) == 1
    assert records(gpu.seen.out)[0]["status"] == "wrong"


def test_a_process_that_was_ended_for_lack_of_time_accuses_nobody(gpu, records):
    def checks(name, *, quick, device):
        gpu.seen.clock.now += 60.0
        raise PluginError("the process ended without a word")
        yield

    assert gpu(checks=checks, names=("flash",)) == 1
    assert records(gpu.seen.out)[0]["detail"] == "no time left"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "cuda was asked for, but this torch finds no CUDA device"),
        (["--device", "tpu"], "--device: expected cuda or cpu, got 'tpu'"),
        (["--device", "cpu:x"], "--device: expected cpu or cuda, got 'cpu:x'"),
        (["--only", "flsh"], "--only: no variant is called 'flsh'; did you mean 'flash'?"),
        (["--budget", "0"], "--budget: expected a number of 1 or more, got '0'"),
        (["--out", "file"], "--out: expected a folder, got the file file"),
        (["--out", "."], ". holds gpu-check.json, which would be replaced"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("file", "gpu-check.json"):
        (tmp_path / name).write_text("", encoding="utf-8")
    assert main(["gpu-check", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_number_beyond_the_devices_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidInput, match=r"below cuda:1.*got cuda:3"):
        gpu_check.check_device("cuda:3")


def test_the_default_budget_leaves_room_within_nine_minutes():
    assert BUDGET <= 9 * 60 - 20


@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
@pytest.mark.parametrize("variant", ["flash", "sliding_window"])
def test_a_cell_is_measured_beside_the_backends_of_the_device(variant, phase, monkeypatch):
    few = functools.partial(gpu_speed.measure, max_rounds=3, sample_seconds=0.0)  # the times are nobody's business here
    monkeypatch.setattr(gpu_speed, "measure", few)
    one = next(c for c in gpu_speed.plan([variant], "cpu") if c.phase == phase)
    status, detail, value = gpu_speed.run_cell(one, "cpu", 60.0)
    assert (status, detail) == ("ok", "")
    assert set(value["calls"]) == {"attnlab", "flash", "math"}
    for call in value["calls"].values():
        assert call["tflops"] == pytest.approx(one.flops / call["seconds"]["median"] / 1e12)
    assert value["ratio"]["best"] in ("flash", "math")


@pytest.mark.parametrize(("variant", "window"), [("flash", None), ("sliding_window", 256)])
def test_every_call_of_a_cell_computes_the_same(variant, window):
    calls = gpu_speed._calls(cell(variant=variant, length=300, causal=True, window=window), "cpu")
    ours, *others = (calls[name]().float() for name in ("attnlab", "flash", "math"))
    for other in others:
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=2e-2)


def test_a_variant_that_refuses_the_shape_says_so():
    status, detail, value = gpu_speed.run_cell(cell(variant="additive"), "cpu", 0.1)
    assert status == "unsupported"
    assert "additive" in detail
    assert value == {}


def test_a_backend_gives_its_reason_and_not_only_that_it_refused():
    def refuses():
        warnings.warn("cuDNN attention kernel not used because: (Triggered internally at a.cpp:1.)", stacklevel=1)
        warnings.warn("head dim 512 is too wide (Triggered internally at a.cpp:2.)", stacklevel=1)
        warnings.warn("Flash attention has been runtime disabled.", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    assert gpu_speed._problem(refuses, lambda: None, torchs=True) == ("unsupported", "head dim 512 is too wide")
    assert gpu_speed._problem(refuses, lambda: None, torchs=False)[0] == "wrong"


@pytest.mark.full
@pytest.mark.parametrize(("budget", "code"), [("120", 0), ("3", 1)])
def test_the_command_itself_on_the_cpu(budget, code, tmp_path):
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    words = ["gpu-check", "--device", "cpu", "--only", "flash", "--budget", budget, "--format", "json", "--out", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "attnlab", *words], capture_output=True, text=True, encoding="utf-8", timeout=120,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)["conformance"][0]
    assert found["status"] == ("ok" if code == 0 else "over budget")
