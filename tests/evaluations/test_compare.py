"""A whole run on tiny inputs with stubbed checks: cells, gate, resume, exit codes, files, interruption."""

import functools
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import attnlab
from attnlab_evaluations import cells, compare, estimates, provenance
from attnlab_evaluations.identity import Identity, variant_identity
from attnlab_evaluations.rows import NULL
from attnlab_evaluations.settings import Settings
from attnlab_evaluations.workloads.sweep import Sweep

FILES = {"results.jsonl", "provenance.json", "table.md", "table.csv"}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    """Three rounds of single calls: these tests look at the bookkeeping, not at the times."""
    monkeypatch.setattr(cells, "measure", functools.partial(cells.measure, max_rounds=3, sample_seconds=0.0))


def passing(*_, **__):
    return [SimpleNamespace(check="fine", status="passed", message="")]


def run(out, *, variants=("dot_product", "linearised"), checks=passing, workloads=None, **more):
    chosen = Settings(
        variants=tuple(variants), workloads=("sweep",), out=out, lengths=more.pop("lengths", (16,)),
        budget=more.pop("budget", 20.0), **more,
    )  # fmt: skip
    return compare.run_compare(chosen, workloads or [Sweep()], run_checks=checks)


def records(out):
    """Every line as written; reading through `Records` would leave out what was over budget."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_fills_every_cell_and_writes_every_file(tmp_path, capsys):
    assert run(tmp_path / "r", lengths=(16, 32)) == 0
    assert {p.name for p in (tmp_path / "r").iterdir()} == FILES
    found = {
        (r["variant"], r["coordinates"].get("length"), r["metric"]): r["status"]
        for r in records(tmp_path / "r")
    }
    for name in ("dot_product", "linearised"):
        for metric in ("error", "forward", "forward_backward", "memory_forward", "memory_forward_backward"):
            assert found[name, 32, metric] == "ok"
    assert (NULL, 32, "forward") in found
    assert "null control" in capsys.readouterr().out


def test_timing_records_keep_raw_samples_and_those_of_the_reference(tmp_path):
    run(tmp_path / "r")
    timed = [r for r in records(tmp_path / "r") if r["metric"] == "forward"]
    assert timed
    for record in timed:
        assert len(record["samples"]) == len(record["reference_samples"]) == record["value"]["rounds"]
        assert record["seed"] == 0


def test_a_variant_that_fails_its_checks_gets_no_numbers_and_exit_code_1(tmp_path, capsys):
    def checks(name, **_):
        status = "failed" if name == "linearised" else "passed"
        return [SimpleNamespace(check="causal_leak", status=status, message="it leaks")]

    assert run(tmp_path / "r", checks=checks) == 1
    mine = [r for r in records(tmp_path / "r") if r["variant"] == "linearised"]
    assert {r["status"] for r in mine} == {"wrong"}
    assert "wrong: causal_leak" in capsys.readouterr().out
    assert (tmp_path / "r" / "table.md").exists()


def test_a_wrong_reference_takes_the_ratios_with_it_but_not_the_times(tmp_path):
    def checks(name, **_):
        status = "failed" if name == "dot_product" else "passed"
        return [SimpleNamespace(check="rows", status=status, message="")]

    assert run(tmp_path / "r", checks=checks) == 1
    timed = next(
        r for r in records(tmp_path / "r") if r["variant"] == "linearised" and r["metric"] == "forward"
    )
    assert timed["status"] == "ok"
    assert timed["value"]["ratio"] is None
    assert "no reference" in (tmp_path / "r" / "table.md").read_text(encoding="utf-8")


def test_a_finished_run_resumes_without_measuring_anything(tmp_path, monkeypatch):
    run(tmp_path / "r")
    before = (tmp_path / "r" / "results.jsonl").read_bytes()
    monkeypatch.setattr(cells, "measure", lambda *_, **__: pytest.fail("timed again"))
    monkeypatch.setattr(cells, "worst_error", lambda *_: pytest.fail("judged again"))
    assert run(tmp_path / "r", resume=True, checks=lambda *_, **__: pytest.fail("checked again")) == 0
    assert (tmp_path / "r" / "results.jsonl").read_bytes() == before


def test_a_resumed_run_measures_what_is_missing_and_keeps_the_rest(tmp_path):
    run(tmp_path / "r")
    path = tmp_path / "r" / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [n for n in lines if not ('"linearised"' in n and '"metric": "forward"' in n)]
    assert len(kept) == len(lines) - 2  # causal and not
    path.write_text("".join(kept), encoding="utf-8")
    assert run(tmp_path / "r", resume=True) == 0
    again = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert again[: len(kept)] == kept
    assert len(again) == len(lines)


def test_a_second_variant_never_gets_the_first_ones_numbers(tmp_path):
    run(tmp_path / "r", variants=["dot_product"])
    run(tmp_path / "r", variants=["dot_product", "linearised"], resume=True)
    forward = [r for r in records(tmp_path / "r") if r["metric"] == "forward" and r["coordinates"]["causal"]]
    assert {r["variant"] for r in forward} == {"dot_product", "linearised", NULL}
    assert len({r["key"] for r in forward}) == 3


def test_control_c_keeps_what_is_finished_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    real = cells.worst_error
    calls = []

    def interrupted(*args, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(cells, "worst_error", interrupted)
    assert run(tmp_path / "r") == 130
    said = capsys.readouterr()
    assert "go on with: attnlab compare --out" in said.err
    assert said.out == ""
    assert {p.name for p in (tmp_path / "r").iterdir()} == {"results.jsonl", "provenance.json"}
    finished = len(records(tmp_path / "r"))
    monkeypatch.undo()
    assert run(tmp_path / "r", resume=True) == 0
    assert len(records(tmp_path / "r")) > finished


def test_a_cell_that_would_not_fit_in_memory_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates.Estimates, "extra_bytes", lambda *_: 2.0**60)
    assert run(tmp_path / "r") == 0
    timed = [r for r in records(tmp_path / "r") if r["metric"] in ("forward", "error", "memory_forward")]
    assert {r["status"] for r in timed if r["variant"] != NULL} == {"out of memory"}
    assert "GiB are free" in timed[0]["detail"]


def test_what_cannot_fit_the_budget_says_so_with_its_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr(
        estimates.Estimates, "seconds", lambda _, __, ___, name, ____: 1e6 if name == "linearised" else 0.0
    )
    run(tmp_path / "r")
    mine = {
        r["metric"]: r for r in records(tmp_path / "r") if r["variant"] == "linearised" and r["coordinates"]
    }
    assert {r["status"] for r in mine.values()} == {"over budget"}
    assert mine["forward"]["detail"] == "~1e+06 s"


def test_an_error_inside_a_variant_is_a_word_and_a_reason_and_the_others_go_on(tmp_path, monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("kernel fell over")

    target = attnlab.default_registry().variant_class("linearised")
    monkeypatch.setattr(target, "attend", breaks)
    run(tmp_path / "r")
    found = {(r["variant"], r["metric"]): r for r in records(tmp_path / "r")}
    assert found["linearised", "forward"]["status"] == "wrong"
    assert found["linearised", "forward"]["detail"] == "RuntimeError: kernel fell over"
    assert found["dot_product", "forward"]["status"] == "ok"


def test_a_workload_that_cannot_run_is_left_out_with_its_hint(tmp_path, capsys):
    class Missing(Sweep):
        name = "missing"

        def unavailable(self):
            return "needs the package x, which is not installed; pip install x"

    assert run(tmp_path / "r", workloads=[Missing(), Sweep()]) == 0
    assert "missing: left out: needs the package x" in capsys.readouterr().out


def test_a_plugins_metric_is_recorded_beside_the_others(tmp_path):
    metric = SimpleNamespace(
        name="parameters", version=1, measure=lambda calls: {"count": len(calls.instances)}
    )
    chosen = Settings(
        variants=("dot_product",), workloads=("sweep",), out=tmp_path / "r", lengths=(16,), budget=9.0
    )
    assert compare.run_compare(chosen, [Sweep()], [metric], run_checks=passing) == 0
    assert any(r["metric"] == "parameters" and r["value"] == {"count": 1} for r in records(tmp_path / "r"))


def test_json_on_stdout_is_json_and_nothing_else(tmp_path, capsys):
    run(tmp_path / "r", form="json")
    said = capsys.readouterr()
    assert {row["variant"] for row in json.loads(said.out)["rows"]} == {"dot_product", "linearised"}
    assert said.err == ""


def test_provenance_tells_machine_code_and_seed_and_nobodys_name(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "somebody-special")
    run(tmp_path / "r")
    text = (tmp_path / "r" / "provenance.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert {"commit", "dirty", "source", "processor", "threads", "versions", "torch_config"} <= set(found)
    assert found["settings"]["seed"] == 0
    assert found["workloads"]["sweep"]["version"] == 1
    assert "somebody-special" not in text
    assert socket.gethostname() not in text or socket.gethostname() in ("localhost", "")


BASE = {
    "attnlab": "1", "commit": "c", "dirty": False, "source": "s", "python": "p", "system": "l", "processor": "x",
    "threads": 2, "versions": {"torch": "2"}, "cuda": None, "torch_config": "t",
}  # fmt: skip


@pytest.mark.parametrize("part", [k for k in BASE if k != "versions"])
def test_a_key_changes_with_each_part_of_the_machine_and_the_code(part):
    changed = {**BASE, part: "other"}
    keys = {
        Identity(provenance.key_inputs(facts), 0, "cpu").key("dot_product", {"length": 1}, "forward")
        for facts in (BASE, changed)
    }
    assert len(keys) == 2


def test_a_key_changes_with_seed_device_workload_place_metric_variant_and_name():
    one = Identity({}, 0, "cpu", {"workload": "w", "version": 1, "facts": {"hash": "a"}})
    place = {"length": 1}
    keys = [
        one.key("dot_product", place, "forward"),
        Identity({}, 1, "cpu", one.more).key("dot_product", place, "forward"),
        Identity({}, 0, "cuda", one.more).key("dot_product", place, "forward"),
        one.extended(workload="v").key("dot_product", place, "forward"),
        one.extended(version=2).key("dot_product", place, "forward"),
        one.extended(facts={"hash": "b"}).key("dot_product", place, "forward"),
        one.key("dot_product", {"length": 2}, "forward"),
        one.key("dot_product", place, "error"),
        one.key("linearised", place, "forward"),
        one.key("linearised_relu", place, "forward"),
        one.key(NULL, place, "forward"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_variants_identity_holds_options_and_the_hash_of_its_source():
    relu, elu = variant_identity("linearised_relu"), variant_identity("linearised")
    assert relu["options"] != elu["options"]
    assert relu["source"] == elu["source"] is not None


BLOCKED = """
import socket
import sys

def refuse(*_, **__):
    raise OSError("no network in this test")

socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refuse
from attnlab.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """The main job in a fresh process that cannot open a connection."""
    folder = tmp_path_factory.mktemp("offline")
    words = [
        "compare",
        "--variants",
        "flash,linearised",
        "--lengths",
        "32,64",
        "--budget",
        "40",
        "--out",
        "r",
    ]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], cwd=folder, capture_output=True, text=True, encoding="utf-8",
        timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return folder / "r", done


def test_the_main_job_runs_with_sockets_blocked(offline_run):
    out, done = offline_run
    assert done.returncode in (0, 1), done.stderr  # 1: a variant failed its checks, and the table says so
    assert {p.name for p in out.iterdir()} == FILES
    assert "Traceback" not in done.stderr


def test_the_main_job_is_silent_on_stderr_where_nobody_looks(offline_run):
    assert offline_run[1].stderr == ""
