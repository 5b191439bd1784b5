"""Whole runs on a tiny recipe: records, resuming, table, goals, heat maps, refusals, interruption."""

import json
import sys
from types import SimpleNamespace

import pytest

from attnlab import VariantUnavailable
from attnlab_evaluations.tasks.dates import heat_map, report, task, training
from attnlab_evaluations.tasks.dates.run import run_dates

PNG = b"\x89PNG\r\n\x1a\n"


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def counting(calls):
    def train(variant, seed, recipe, **more):
        calls.append((variant, seed))
        return training.train(variant, seed, recipe, **more)

    return train


def never(*_, **__):
    raise AssertionError("trained again")


def test_a_run_leaves_records_summary_table_and_heat_maps(run, tmp_path, capsys):
    calls = []
    assert run(tmp_path, trainer=counting(calls), pictures=True) == 0
    assert calls == [(None, 0), ("additive", 0), (None, 1), ("additive", 1)]
    cells = [r for r in lines(tmp_path) if r["metric"] == "exact"]
    assert [(c["variant"], c["seed"], c["status"]) for c in cells] == [
        ("none", 0, "ok"), ("additive", 0, "ok"), ("none", 1, "ok"), ("additive", 1, "ok"),
    ]  # fmt: skip
    for cell in cells:
        value = cell["value"]
        assert len(value["hits"]) == 6
        assert value["exact"] == value["hits"].count("1") / 6
        assert len(value["wrong"]) == min(5, value["hits"].count("0"))
        assert value["parameters"] > 100
        assert len(value["losses"]) == 3
    assert {p.name for p in tmp_path.iterdir()} == {
        "results.jsonl", "dates.json", "alignment-additive-seed0.png", "alignment-additive-seed1.png",
    }  # fmt: skip
    summary = json.loads((tmp_path / "dates.json").read_text(encoding="utf-8"))
    assert summary["cells"] == cells
    assert summary["settings"]["recipe"]["steps"] == 3
    assert summary["provenance"]["versions"]["Babel"]
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[2:4]] == ["none", "additive"]
    assert "none: no heat map: seq2seq: expected a variant" in said.out
    assert said.out.count("no heat map") == 1
    assert said.err == ""


def test_finished_cells_are_not_trained_again_and_new_ones_are(run, tmp_path, capsys):
    run(tmp_path, seeds=1)
    first = capsys.readouterr().out
    for picture in tmp_path.glob("*.png"):
        picture.unlink()
    assert run(tmp_path, seeds=1, trainer=never) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "alignment-additive-seed0.png").exists()  # drawn from the record
    calls = []
    run(tmp_path, seeds=2, variants=("none", "additive", "linearised"), trainer=counting(calls))
    assert calls == [("linearised", 0), (None, 1), ("additive", 1), ("linearised", 1)]
    assert len([r for r in lines(tmp_path) if r["metric"] == "exact"]) == 6


@pytest.mark.parametrize("changed", [{"examples": 7}, {"beam": 2}, {"steps": 4}])
def test_a_cell_of_another_question_is_no_answer(changed, run, tmp_path, tiny):
    run(tmp_path, seeds=1)
    calls = []
    more = {"recipe": tiny(steps=4)} if "steps" in changed else changed
    run(tmp_path, seeds=1, trainer=counting(calls), **more)
    assert calls == [(None, 0), ("additive", 0)]


def test_a_torn_last_record_is_trained_again(run, tmp_path):
    run(tmp_path, seeds=1)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    calls = []
    run(tmp_path, seeds=1, trainer=counting(calls))
    assert calls == [("additive", 0)]


def test_a_heat_map_is_a_picture_with_the_characters_on_its_axes(tmp_path, tiny, monkeypatch):
    from matplotlib.figure import Figure

    model = training.train("additive", 0, tiny()).model
    found = training.alignment(model, task.examples(1, 1, (2, 5), locales=["pl_PL"])[0])
    kept = []
    plain = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), plain(self, *a, **k))[1])
    heat_map.save(tmp_path / "one.png", "a title", [found, found])
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)
    assert [p.name for p in tmp_path.iterdir()] == ["one.png"]
    axes = kept[0].axes[0]
    source = [label.get_text() for label in axes.get_xticklabels()]
    assert "".join(source).replace("␣", " ") == found["source"]
    assert " " not in source
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == [*found["written"], *["end"] * found["ended"]]
    assert axes.images[0].get_array().tolist() == found["weights"]


def test_without_matplotlib_the_run_goes_on_and_says_what_to_install(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(tmp_path) == 0
    said = capsys.readouterr().out
    assert said.count("pip install 'attnlab[plots]'") == 1
    assert not list(tmp_path.glob("*.png"))


def test_a_heat_map_without_matplotlib_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(VariantUnavailable, match=r"pip install 'attnlab\[plots\]'"):
        heat_map.save(tmp_path / "x.png", "", [])
    assert not list(tmp_path.iterdir())


def test_without_babel_nothing_is_made(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    monkeypatch.setitem(sys.modules, "babel.dates", None)
    with pytest.raises(VariantUnavailable, match=r"pip install 'attnlab\[dates\]'"):
        run(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_variant_without_weights_is_trained_and_its_heat_map_refused_in_a_sentence(run, tmp_path, capsys):
    assert run(tmp_path, variants=("none", "flash"), seeds=1) == 0
    said = capsys.readouterr().out
    assert "flash: no heat map: flash does not support need_weights=True" in said
    assert not list(tmp_path.glob("*.png"))
    assert lines(tmp_path)[-1]["status"] == "ok"


def test_a_variant_that_cannot_attend_across_lengths_says_so_in_its_row(run, tmp_path, capsys):
    assert run(tmp_path, variants=("none", "sliding_window"), seeds=1) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("sliding_window"))
    assert "unsupported" in row
    assert lines(tmp_path)[-1]["detail"].startswith("sliding_window does not support 1 queries")


def test_a_variant_that_fails_its_checks_is_not_trained(run, tmp_path, capsys):
    def failing(name, **_):
        return [SimpleNamespace(check="values", status="failed", message="it is off")]

    calls = []
    assert run(tmp_path, checks=failing, trainer=counting(calls), check=True) == 1
    assert calls == [(None, 0), (None, 1)]
    assert "wrong: conformance: values" in capsys.readouterr().out


def test_time_that_was_up_is_told_with_the_command_that_goes_on_and_tried_again(run, tmp_path, capsys):
    def slow(variant, seed, recipe, **more):
        raise training.OverBudget("9 s were up after 1 of 3 steps")

    assert run(tmp_path, seeds=1, trainer=slow) == 0
    said = capsys.readouterr().out
    assert "over budget: 9 s were up after 1 of 3 steps" in said
    assert "attnlab dates none additive --out" in said
    calls = []
    run(tmp_path, seeds=1, trainer=counting(calls))
    assert calls == [(None, 0), ("additive", 0)]


def test_a_training_that_raises_is_recorded_and_the_others_follow(run, tmp_path, capsys):
    def broken(variant, seed, recipe, **more):
        if variant == "additive":
            raise RuntimeError("boom\nat length")
        return training.train(variant, seed, recipe, **more)

    run(tmp_path, variants=("none", "additive", "linearised"), seeds=1, trainer=broken)
    assert [r["status"] for r in lines(tmp_path) if r["metric"] == "exact"] == ["ok", "wrong", "ok"]
    assert "wrong: RuntimeError: boom at length" in capsys.readouterr().out


def test_an_interruption_keeps_what_is_finished_and_names_the_command(run, tmp_path, capsys):
    def stopped(variant, seed, recipe, **more):
        if variant == "additive":
            raise KeyboardInterrupt
        return training.train(variant, seed, recipe, **more)

    assert run(tmp_path / "a", seeds=1, trainer=stopped) == 130
    assert "go on with: attnlab dates none additive --out" in capsys.readouterr().err
    assert [r["variant"] for r in lines(tmp_path / "a") if r["metric"] == "exact"] == ["none"]


def test_goals_are_judged_for_every_seed_and_change_the_exit_code_only_when_asked(run, tmp_path, capsys):
    assert run(tmp_path, seeds=1) == 0
    assert "goal:" not in capsys.readouterr().out
    assert run(tmp_path, seeds=1, check=True) == 1  # three steps teach nothing
    assert "goal: additive at least 95 %: missed (0.0)" in capsys.readouterr().out


def cell(variant, exact, status="ok"):
    return {"variant": variant, "seed": 0, "status": status, "detail": "", "value": {"exact": exact}}


@pytest.mark.parametrize(
    ("cells", "reached"),
    [
        ([cell("additive", 0.95), cell("additive", 1.0), cell("none", 0.30)], [True, True]),
        ([cell("additive", 0.949), cell("additive", 1.0), cell("none", 0.31)], [False, False]),
        ([cell("multiplicative", 1.0), cell("multiplicative", 1.0, "over budget")], [False]),
        ([cell("linearised", 0.0)], []),
    ],
)
def test_a_goal_is_reached_by_every_seed_or_missed(cells, reached):
    assert [goal["reached"] for goal in report.goals(cells)] == reached


def test_a_table_shows_every_seed_and_never_the_best_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    value = {"parameters": 10, "seconds": 2.0, "cpu_seconds": 3.0}
    cells = [
        {"variant": "additive", "seed": s, "status": "ok", "detail": "", "value": {**value, "exact": e}}
        for s, e in enumerate([1.0, 0.5])
    ]
    row = report.table(cells, ["additive"], 2, 1).splitlines()[-1].split()
    assert row == ["additive", "100.0", "50.0", "75.0", "10", "2.0", "3.0", "ok"]
    cells[1] = {**cells[1], "status": "over budget", "detail": "why", "value": {}}
    row = report.table(cells, ["additive"], 2, 1).splitlines()[-1]
    assert "over budget: why" in row
    assert "n/a" in row  # no mean of one seed that came through


def test_a_beam_adds_a_column(run, tmp_path, capsys):
    run(tmp_path, seeds=1, beam=2, length_power=1.0)
    assert "mean, beam 2" in capsys.readouterr().out
    assert "exact_beam" in lines(tmp_path)[-1]["value"]


def test_json_on_stdout_is_the_summary(run, tmp_path, capsys):
    run(tmp_path, seeds=1, form="json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "dates.json").read_text("utf-8"))


def test_the_threads_of_torch_are_set_and_given_back(run, tmp_path):
    import torch

    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)

    def look(variant, seed, recipe, **more):
        seen.append(torch.get_num_threads())
        return training.train(variant, seed, recipe, **more)

    run(tmp_path, seeds=1, threads=1, trainer=look)
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (seen, after) == ([1, 1], 2)


def test_a_device_that_is_not_there_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    import torch

    from attnlab import InvalidInput
    from attnlab_evaluations.tasks.dates.settings import DatesSettings

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInput, match="finds no CUDA device"):
        run_dates(DatesSettings(variants=("none",), out=tmp_path / "new", device="cuda"))
    assert not (tmp_path / "new").exists()
