"""A whole run on tiny inputs with stubbed checks: cells, gate, resume, exit codes, files."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnlab
from attnlab_evaluations.frame import provenance
from attnlab_evaluations.frame.identity import Identity, variant_identity
from attnlab_evaluations.tasks.compare import cells
from attnlab_evaluations.tasks.compare import run as compare
from attnlab_evaluations.tasks.compare.rows import NULL
from attnlab_evaluations.tasks.compare.settings import Settings
from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep

FILES = {"results.jsonl", "provenance.json", "table.md", "table.csv"}


def passing(*_, **__):
    return [SimpleNamespace(check="fine", status="passed", message="")]


def test_a_run_fills_every_cell_and_writes_every_file(run, records, tmp_path, capsys):
    assert run(tmp_path / "r", lengths=(16, 32)) == 0
    assert {p.name for p in (tmp_path / "r").iterdir()} == FILES
    found = {(r["variant"], r["coordinates"].get("length"), r["metric"]): r["status"] for r in records(tmp_path / "r")}
    for name in ("dot_product", "linearised"):
        for metric in ("error", "forward", "forward_backward", "memory_forward", "memory_forward_backward"):
            assert found[name, 32, metric] == "ok"
    assert (NULL, 32, "forward") in found
    assert "null control" in capsys.readouterr().out


def test_timing_records_keep_raw_samples_and_those_of_the_reference(run, records, tmp_path):
    run(tmp_path / "r")
    timed = [r for r in records(tmp_path / "r") if r["metric"] == "forward"]
    assert timed
    for record in timed:
        assert len(record["samples"]) == len(record["reference_samples"]) == record["value"]["rounds"]
        assert record["seed"] == 0


def test_a_variant_that_fails_its_checks_gets_no_numbers_and_exit_code_1(run, records, tmp_path, capsys):
    def checks(name, **_):
        status = "failed" if name == "linearised" else "passed"
        return [SimpleNamespace(check="causal_leak", status=status, message="it leaks")]

    assert run(tmp_path / "r", checks=checks) == 1
    mine = [r for r in records(tmp_path / "r") if r["variant"] == "linearised"]
    assert {r["status"] for r in mine} == {"wrong"}
    assert "wrong: causal_leak" in capsys.readouterr().out
    assert (tmp_path / "r" / "table.md").exists()


def test_a_wrong_reference_takes_the_ratios_with_it_but_not_the_times(run, records, tmp_path):
    def checks(name, **_):
        status = "failed" if name == "dot_product" else "passed"
        return [SimpleNamespace(check="rows", status=status, message="")]

    assert run(tmp_path / "r", checks=checks) == 1
    timed = next(r for r in records(tmp_path / "r") if r["variant"] == "linearised" and r["metric"] == "forward")
    assert timed["status"] == "ok"
    assert timed["value"]["ratio"] is None
    assert "no reference" in (tmp_path / "r" / "table.md").read_text(encoding="utf-8")


def test_a_finished_run_resumes_without_measuring_anything(run, tmp_path, monkeypatch):
    run(tmp_path / "r")
    before = (tmp_path / "r" / "results.jsonl").read_bytes()
    monkeypatch.setattr(cells, "measure", lambda *_, **__: pytest.fail("timed again"))
    monkeypatch.setattr(cells, "judge_error", lambda *_, **__: pytest.fail("judged again"))
    assert run(tmp_path / "r", resume=True, checks=lambda *_, **__: pytest.fail("checked again")) == 0
    assert (tmp_path / "r" / "results.jsonl").read_bytes() == before


def test_a_resumed_run_measures_what_is_missing_and_keeps_the_rest(run, tmp_path):
    run(tmp_path / "r")
    path = tmp_path / "r" / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [n for n in lines if not ('"linearised"' in n and '"metric": "forward"' in n)]
    assert len(kept) == len(lines) - 4  # causal and not, and both null controls
    path.write_text("".join(kept), encoding="utf-8")
    assert run(tmp_path / "r", resume=True) == 0
    again = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert again[: len(kept)] == kept
    assert len(again) == len(lines)


def test_a_second_variant_never_gets_the_first_ones_numbers(run, records, tmp_path):
    run(tmp_path / "r", variants=["dot_product"])
    run(tmp_path / "r", variants=["dot_product", "linearised"], resume=True)
    forward = [r for r in records(tmp_path / "r") if r["metric"] == "forward" and r["coordinates"]["causal"]]
    assert {r["variant"] for r in forward} == {"dot_product", "linearised", NULL, "linearised again"}
    assert len({r["key"] for r in forward}) == 4


@pytest.mark.parametrize("name", ["日本語", "with space", "-run", "a'b\"c"])
def test_a_run_folder_may_have_any_name(run, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(Path(name), variants=["dot_product"]) == 0
    assert {p.name for p in (tmp_path / name).iterdir()} == FILES
    assert f"run folder: {name}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_a_run_folder_whose_name_is_not_utf8_gets_readable_files(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace"))
    out = Path(os.fsdecode(b"caf\xe9"))
    assert run(out, variants=["dot_product"], registry=(str(out),)) == 0
    assert os.listdir(b".") == [b"caf\xe9"]
    for file in FILES:
        (out / file).read_text(encoding="utf-8")  # raises where it is not


def test_the_greatest_seed_runs_and_differs_from_the_smallest(run, records, tmp_path):
    for seed in (0, 2**32 - 1):
        assert run(tmp_path / str(seed), variants=["dot_product"], seed=seed) == 0
    keys = [{r["key"] for r in records(tmp_path / str(seed))} for seed in (0, 2**32 - 1)]
    assert not keys[0] & keys[1]
    assert {r["status"] for r in records(tmp_path / str(2**32 - 1))} == {"ok"}


def test_an_error_inside_a_variant_is_a_word_and_a_reason_and_the_others_go_on(run, records, tmp_path, monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("kernel fell over")

    target = attnlab.default_registry().variant_class("linearised")
    monkeypatch.setattr(target, "attend", breaks)
    run(tmp_path / "r")
    found = {(r["variant"], r["metric"]): r for r in records(tmp_path / "r")}
    assert found["linearised", "forward"]["status"] == "wrong"
    assert found["linearised", "forward"]["detail"] == "RuntimeError: kernel fell over"
    assert found["dot_product", "forward"]["status"] == "ok"


def test_a_workload_that_cannot_run_is_left_out_with_its_hint(run, tmp_path, capsys):
    class Missing(Sweep):
        name = "missing"

        def unavailable(self):
            return "needs the package x, which is not installed; pip install x"

    assert run(tmp_path / "r", workloads=[Missing(), Sweep()]) == 0
    assert "missing: left out: needs the package x" in capsys.readouterr().out


def test_a_variant_that_is_wrong_at_one_measured_shape_only_is_wrong_there(
    run, records, tmp_path, monkeypatch, capsys
):  # F46
    target = attnlab.default_registry().variant_class("linearised")
    right = target.attend

    def attend(self, query, key, value, call):
        found = right(self, query, key, value, call)
        return attnlab.AttentionOutput(found.out + 0.67) if query.shape[2] == 24 else found

    monkeypatch.setattr(target, "attend", attend)
    assert run(tmp_path / "r", lengths=(16, 24)) == 1
    errors = {
        (r["coordinates"]["length"], r["status"])
        for r in records(tmp_path / "r")
        if r["metric"] == "error" and r["variant"] == "linearised"
    }
    assert errors == {(16, "ok"), (24, "wrong")}
    assert "wrong: error 6.7e-01 at query row" in capsys.readouterr().out
    assert "wrong: error 6.7e-01" in (tmp_path / "r" / "table.md").read_text(encoding="utf-8")


def test_a_plugins_metric_is_recorded_beside_the_others(records, tmp_path):
    metric = SimpleNamespace(name="parameters", version=1, measure=lambda calls: {"count": len(calls.instances)})
    chosen = Settings(variants=("dot_product",), workloads=("sweep",), out=tmp_path / "r", lengths=(16,), budget=9.0)
    assert compare.run_compare(chosen, [Sweep()], [metric], run_checks=passing) == 0
    assert any(r["metric"] == "parameters" and r["value"] == {"count": 1} for r in records(tmp_path / "r"))


def test_json_on_stdout_is_json_and_nothing_else(run, tmp_path, capsys):
    run(tmp_path / "r", form="json")
    said = capsys.readouterr()
    assert {row["variant"] for row in json.loads(said.out)["rows"]} == {"dot_product", "linearised"}
    assert said.err == ""


def test_provenance_tells_machine_code_and_seed_and_nobodys_name(run, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("part", [k for k in BASE if k not in ("versions", "commit", "dirty", "system")])
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
    """The main job in a fresh process that cannot open a connection, on a terminal that knows ASCII only."""
    folder = tmp_path_factory.mktemp("offline")
    words = ["compare", "--variants", "flash,linearised", "--lengths", "32,64", "--budget", "40", "--out", "日本"]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], cwd=folder, capture_output=True, text=True, encoding="utf-8",
        timeout=300, env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "ascii", "COLUMNS": "20"},
    )  # fmt: skip
    return folder / "日本", done


def test_the_main_job_runs_with_sockets_blocked(offline_run):
    out, done = offline_run
    assert done.returncode in (0, 1), done.stderr  # 1: a variant failed its checks, and the table says so
    assert {p.name for p in out.iterdir()} == FILES
    assert "Traceback" not in done.stderr


def test_the_main_job_is_silent_on_stderr_where_nobody_looks(offline_run):
    assert offline_run[1].stderr == ""


def test_the_main_job_prints_what_the_terminal_can_show(offline_run):
    said = offline_run[1].stdout
    assert said.isascii()
    assert "run folder: \\u65e5\\u672c" in said
