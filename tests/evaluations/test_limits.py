"""Runs that meet a limit: memory, time, an interruption. What is finished stays, the rest says why, nothing is torn."""

import json

import pytest

import attnlab
from attnlab_evaluations.frame.budget import Budget
from attnlab_evaluations.measure import estimates
from attnlab_evaluations.measure.claims import original
from attnlab_evaluations.tasks.compare import cells
from attnlab_evaluations.tasks.compare import run as compare
from attnlab_evaluations.tasks.compare.rows import NULL
from attnlab_evaluations.tasks.compare.workloads import WorkloadSettings, sweep
from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep


def test_control_c_keeps_what_is_finished_and_says_how_to_go_on(run, records, tmp_path, monkeypatch, capsys):
    real = cells.judge_error
    calls = []

    def interrupted(*args, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    with monkeypatch.context() as short:
        short.setattr(cells, "judge_error", interrupted)
        assert run(tmp_path / "r") == 130
    said = capsys.readouterr()
    assert "go on with: attnlab compare --out" in said.err
    assert said.out == ""
    assert {p.name for p in (tmp_path / "r").iterdir()} == {"results.jsonl", "provenance.json"}
    finished = len(records(tmp_path / "r"))
    assert run(tmp_path / "r", resume=True) == 0
    assert len(records(tmp_path / "r")) > finished


def test_a_length_beyond_memory_is_refused_with_its_estimate_and_the_others_are_measured(run, records, tmp_path):
    beyond = 2**31 - 1  # 12 TiB of inputs
    assert run(tmp_path / "r", lengths=(16, beyond)) == 0
    cells_of = {16: [], beyond: []}
    for record in records(tmp_path / "r"):
        if record["coordinates"] and record["variant"] == original(record["variant"]):
            cells_of[record["coordinates"]["length"]].append(record)
    assert {r["status"] for r in cells_of[16]} == {"ok"}
    assert {r["status"] for r in cells_of[beyond]} == {"out of memory"}
    assert len(cells_of[beyond]) == len(cells_of[16])
    table = (tmp_path / "r" / "table.md").read_text(encoding="utf-8")
    assert "out of memory (the inputs alone need about 12,288 GiB, " in table
    assert "GiB are free)" in table


def test_a_length_beyond_memory_takes_no_time_from_the_others():
    problems = Sweep().problems(WorkloadSettings(lengths=(16, 2**31 - 1)))
    weights = compare._weights([(Sweep(), problems, {})], 2**34)
    assert {place for _, place, _ in weights} == {str(p.coordinates) for p in problems[:2]}
    assert sum(weights.values()) == pytest.approx(Sweep.share)
    assert len(compare._weights([(Sweep(), problems, {})], None)) == 8


def torch_ran_out(*_, **__):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried\nmore")


@pytest.mark.parametrize("where", ["build", "prepare"])
def test_running_out_of_memory_before_any_call_is_a_word_in_each_cell(run, records, where, tmp_path, monkeypatch):
    if where == "build":
        monkeypatch.setattr(sweep, "inputs", torch_ran_out)
    else:
        monkeypatch.setattr(cells, "prepare", torch_ran_out)
    assert run(tmp_path / "r") == 0
    found = [r for r in records(tmp_path / "r") if r["coordinates"]]
    assert {r["variant"] for r in found} == {"dot_product", "linearised"}
    assert {r["metric"] for r in found} > {"error", "forward", "memory_forward_backward"}
    assert {r["status"] for r in found} == {"out of memory"}
    assert {r["detail"] for r in found} == {
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    }


@pytest.mark.parametrize("where", ["build", "prepare"])
def test_an_error_that_is_not_about_memory_is_not_hidden_as_such(run, where, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(*((sweep, "inputs", broken) if where == "build" else (cells, "prepare", broken)))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(tmp_path / "r")


def test_a_reference_that_does_not_fit_is_not_called_and_the_others_are_timed_without_ratio(
    run, records, tmp_path, monkeypatch
):
    real = estimates.Estimates.extra_bytes

    def guess(self, problem, phase, name, calls):
        return 2.0**60 if name == "dot_product" else real(self, problem, phase, name, calls)

    def called(*_, **__):
        pytest.fail("the reference was called")

    monkeypatch.setattr(estimates.Estimates, "extra_bytes", guess)
    monkeypatch.setattr(attnlab.default_registry().variant_class("dot_product"), "attend", called)
    assert run(tmp_path / "r") == 0
    found = {(r["variant"], r["metric"]): r for r in records(tmp_path / "r") if r["coordinates"]}
    assert found["dot_product", "forward"]["status"] == found[NULL, "forward"]["status"] == "out of memory"
    assert found["linearised", "forward"]["status"] == "ok"
    assert found["linearised", "forward"]["value"]["ratio"] is None
    assert "nothing is claimed" in (tmp_path / "r" / "table.md").read_text(encoding="utf-8")


def test_an_error_that_cannot_be_judged_within_memory_is_not_judged(run, records, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "definition_bytes", lambda _: 2**60)
    monkeypatch.setattr(cells, "judge_error", lambda *_, **__: pytest.fail("judged"))
    assert run(tmp_path / "r") == 0
    found = {(r["variant"], r["metric"]): r for r in records(tmp_path / "r")}
    assert found["linearised", "error"]["status"] == "out of memory"
    assert found["linearised", "forward"]["status"] == "ok"


def test_a_cell_that_lacked_memory_is_tried_again_by_the_next_run(run, tmp_path, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr(sweep, "inputs", torch_ran_out)
        run(tmp_path / "r")
    assert run(tmp_path / "r", resume=True) == 0
    assert "out of memory" not in (tmp_path / "r" / "table.md").read_text(encoding="utf-8")


def no_parts(folder):
    return not [p for p in folder.rglob("*") if p.suffix == ".part"]


@pytest.mark.parametrize(
    ("where", "at"), [("measure", 1), ("measure", 2), ("peak", 1), ("judge_error", 1), ("judge_error", 2), ("build", 2)]
)
def test_an_interrupted_run_leaves_whole_records_wherever_it_was(run, where, at, tmp_path, monkeypatch, capsys):
    owner, name = {"peak": (cells.memory, "peak_extra_bytes"), "build": (sweep, "inputs")}.get(where, (cells, where))
    real, seen = getattr(owner, name), []

    def interrupted(*args, **more):
        seen.append(1)
        if len(seen) == at:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(owner, name, interrupted)
    assert run(tmp_path / "r") == 130
    text = (tmp_path / "r" / "results.jsonl").read_bytes()
    assert text.endswith(b"\n")
    assert all({"schema", "key", "status"} <= set(json.loads(line)) for line in text.splitlines())
    assert no_parts(tmp_path)
    assert "finished cells are kept in" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError("the checks themselves are broken")])
def test_a_run_that_ends_before_its_first_record_leaves_no_folder(run, stop, tmp_path, capsys):
    def checks(*_, **__):
        raise stop

    if stop is KeyboardInterrupt:
        assert run(tmp_path / "new" / "r", checks=checks) == 130
        assert capsys.readouterr().err == "interrupted; nothing was measured yet and nothing was kept\n"
    else:
        with pytest.raises(RuntimeError, match="broken"):
            run(tmp_path / "new" / "r", checks=checks)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_before_stays_as_it_was(run, tmp_path):
    def checks(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes.txt").write_text("mine", encoding="utf-8")
    assert run(tmp_path / "r", checks=checks) == 130
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["notes.txt"]


def test_a_cell_that_would_not_fit_in_memory_is_not_tried(run, records, tmp_path, monkeypatch):
    monkeypatch.setattr(estimates.Estimates, "extra_bytes", lambda *_: 2.0**60)
    assert run(tmp_path / "r") == 0
    timed = [r for r in records(tmp_path / "r") if r["metric"] in ("forward", "error", "memory_forward")]
    assert {r["status"] for r in timed if r["variant"] != NULL} == {"out of memory"}
    assert "GiB are free" in timed[0]["detail"]


def test_without_time_left_no_inputs_are_built(run, records, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "inputs", lambda *_: pytest.fail("built"))
    monkeypatch.setattr(compare, "Budget", lambda _, *rest: Budget(0.0, *rest))
    assert run(tmp_path / "r") == 0
    found = [r for r in records(tmp_path / "r") if r["coordinates"]]
    assert {(r["status"], r["detail"]) for r in found} == {("over budget", "no time left")}


def test_what_cannot_fit_the_budget_says_so_with_its_estimate(run, records, tmp_path, monkeypatch):
    monkeypatch.setattr(
        estimates.Estimates, "seconds", lambda _, __, ___, name, ____: 1e6 if name == "linearised" else 0.0
    )
    run(tmp_path / "r")
    mine = {r["metric"]: r for r in records(tmp_path / "r") if r["variant"] == "linearised" and r["coordinates"]}
    assert {r["status"] for r in mine.values()} == {"over budget"}
    assert mine["forward"]["detail"] == "~1e+06 s"
