"""Whole runs on a tiny recipe: records, resuming, tables, refusals, interruption."""

import json
from types import SimpleNamespace

import pytest

from attnlab import InvalidInput
from attnlab_evaluations.tasks.capacity import report, training


def lines(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def counting(calls):
    def train(chosen, seed, count, setting, recipe, **more):
        calls.append((chosen.label, count, seed))
        return training.train(chosen, seed, count, setting, recipe, **more)

    return train


def never(*_, **__):
    raise AssertionError("trained again")


def test_a_run_leaves_one_record_a_cell_a_summary_and_two_tables(run, tmp_path, capsys):
    assert run(tmp_path, keys=(3, 4)) == 0
    cells = [r for r in lines(tmp_path) if r["metric"] == "capacity"]
    assert [(c["keys"], c["seed"], c["variant"]) for c in cells] == [
        (n, s, v) for n in (3, 4) for s in (0, 1) for v in ("dot_product", "linearised")
    ]
    for cell in cells:
        value = cell["value"]
        assert cell["status"] == "ok"
        assert value["loss"] == min(loss for _, loss, _ in value["evaluations"])
        assert [step for step, _, _ in value["evaluations"]] == [2, 4]
        assert (value["stopped"], value["unit_length"]) == ("steps", False)
        assert value["parameters"] > 50
    assert {p.name for p in tmp_path.iterdir()} == {"results.jsonl", "capacity.json"}
    summary = json.loads((tmp_path / "capacity.json").read_text(encoding="utf-8"))
    assert summary["cells"] == cells
    assert summary["trivial"] == {"loss": 0.5, "accuracy": {"3": 1 / 3, "4": 0.25}}
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[0] for row in rows if row and row[0] in ("dot_product", "linearised", "trivial")] == 2 * [
        "dot_product", "linearised", "trivial"
    ]  # fmt: skip
    assert ["trivial", "0.33", "0.25"] in rows
    assert ["trivial", "0.5", "0.5"] in rows
    assert said.err == ""


def test_finished_cells_are_not_trained_again_and_new_ones_are(run, tmp_path, capsys):
    run(tmp_path, seeds=1)
    first = capsys.readouterr().out
    assert run(tmp_path, seeds=1, trainer=never) == 0
    assert capsys.readouterr().out == first
    calls = []
    run(tmp_path, "dot_product", "additive", keys=(3, 4), seeds=1, trainer=counting(calls))
    assert calls == [("additive", 3, 0), ("dot_product", 4, 0), ("additive", 4, 0)]


@pytest.mark.parametrize("changed", [{"setting": "overwrite"}, {"steps": 6}, {"names": "linearised:feature_map=exp"}])
def test_a_cell_of_another_question_is_no_answer(changed, run, tmp_path, tiny):
    run(tmp_path, "linearised", seeds=1)
    calls = []
    more = {"recipe": tiny(max_steps=6)} if "steps" in changed else {}
    more |= {"setting": changed["setting"]} if "setting" in changed else {}
    run(tmp_path, changed.get("names", "linearised"), seeds=1, trainer=counting(calls), **more)
    assert len(calls) == 1


def test_a_torn_last_record_alone_is_trained_again(run, tmp_path):
    run(tmp_path, seeds=1)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    calls = []
    run(tmp_path, seeds=1, trainer=counting(calls))
    assert calls == [("linearised", 3, 0)]


def test_an_interruption_keeps_what_is_finished_and_names_the_command(run, tmp_path, capsys):
    def stopped(chosen, seed, *rest, **more):
        if chosen.name == "linearised":
            raise KeyboardInterrupt
        return training.train(chosen, seed, *rest, **more)

    assert run(tmp_path / "a", trainer=stopped) == 130
    assert "go on with: attnlab capacity dot_product linearised --out" in capsys.readouterr().err
    assert [r["variant"] for r in lines(tmp_path / "a") if r["metric"] == "capacity"] == ["dot_product"]


def test_options_are_given_to_the_variant_and_checked_with_it(run, tmp_path, capsys):
    checked, made = [], []

    def checks(variant, **_):
        checked.append(variant)
        return [SimpleNamespace(check="fine", status="passed", message="")]

    def keep(*asked, **more):
        trained = training.train(*asked, **more)
        made.append(trained.memory.attention)
        return trained

    label = "linearised:feature_map=exp"
    assert run(tmp_path, label, "linearised", seeds=1, checks=checks, trainer=keep) == 0
    assert [m.options["feature_map"] for m in made] == ["exp", "elu"]
    assert checked[0].options["feature_map"] == "exp"
    assert checked[1] == "linearised"
    assert any(line.startswith(label) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("linearised:feature_map=sine", r"linearised: feature_map must be one of .*got 'sine'"),
        ("dot_product:nu=1", "dot_product: unknown option 'nu'; it accepts none"),
    ],
)
def test_an_option_that_the_class_does_not_take_is_refused_before_anything_is_made(word, says, run, tmp_path):
    with pytest.raises(InvalidInput, match=says):
        run(tmp_path / "new", word)
    assert not (tmp_path / "new").exists()


def test_a_variant_that_fails_its_checks_is_not_trained(run, tmp_path, capsys):
    def failing(name, **_):
        return [SimpleNamespace(check="values", status="failed", message="it is off")]

    assert run(tmp_path, "dot_product", checks=failing, trainer=never) == 0
    assert "dot_product: wrong: conformance: values" in capsys.readouterr().out


def test_a_refusal_and_a_fault_are_told_and_the_others_follow(run, tmp_path, capsys):
    def broken(chosen, *rest, **more):
        if chosen.name == "linearised":
            raise RuntimeError("boom\nat length")
        return training.train(chosen, *rest, **more)

    assert run(tmp_path, "sliding_window", "linearised", "dot_product", seeds=1, trainer=broken) == 0
    status = [r["status"] for r in lines(tmp_path) if r["metric"] == "capacity"]
    assert status == ["unsupported", "wrong", "ok"]
    said = capsys.readouterr().out
    assert "linearised: wrong: RuntimeError: boom at length" in said
    assert "sliding_window: unsupported: sliding_window declares no cross lengths" in said


def test_json_on_stdout_is_the_summary(run, tmp_path, capsys):
    run(tmp_path, seeds=1, form="json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "capacity.json").read_text("utf-8"))


def test_unit_length_is_said_where_it_was_given(run, tmp_path, capsys):
    run(tmp_path, "dot_product", "delta_rule", seeds=1)
    assert "\ndelta_rule: keys and queries of unit length" in capsys.readouterr().out


def cell(seed, loss, accuracy, stopped="solved"):
    value = {"loss": loss, "accuracy": accuracy, "stopped": stopped}
    return {"variant": "dot_product", "keys": 8, "seed": seed, "status": "ok", "detail": "", "value": value}


def tables(cells, width=16, setting="capacity"):
    from pathlib import Path

    from attnlab_evaluations.frame.chosen import choose
    from attnlab_evaluations.tasks.capacity.recipe import Recipe
    from attnlab_evaluations.tasks.capacity.settings import CapacitySettings

    settings = CapacitySettings(
        variants=choose("capacity", ["dot_product"]), out=Path(), keys=(8,), setting=setting,
        recipe=Recipe(width=width),
    )  # fmt: skip
    return report.tables(cells, settings), report.legend(cells, settings)


def test_a_table_shows_the_span_of_all_seeds_and_marks_what_was_still_learning():
    table, legend = tables([cell(0, 0.5, 0.25), cell(1, 0.0123, 1.0, "steps")])
    rows = [line.split() for line in table.splitlines()]
    assert ["dot_product", "0.25-1.00+"] in rows
    assert ["dot_product", "0.012-0.5+"] in rows
    assert "+ a training's 3000 steps were up before its loss stood still" in legend
    table, legend = tables([cell(0, 0.5, 1.0), cell(1, 0.5, 1.0)])
    assert ["dot_product", "1.00"] in [line.split() for line in table.splitlines()]
    assert len(legend) == 1


def test_a_seed_without_a_number_leaves_its_status_in_the_cell():
    bad = {"variant": "dot_product", "keys": 8, "seed": 1, "status": "wrong", "detail": "why", "value": {}}
    table, legend = tables([cell(0, 0.5, 1.0), bad])
    assert ["dot_product", "wrong"] in [line.split() for line in table.splitlines()]
    assert legend[-1] == "dot_product: wrong: why"


def test_what_was_published_stands_beside_at_its_width_only():
    table, legend = tables([cell(0, 0.5, 1.0)], width=64)
    assert "<= .0003 to N=120, fails from 360" in table
    assert "published: best loss, Schlag et al. 2021" in legend[-1]
    table, legend = tables([cell(0, 0.5, 1.0)])
    assert "published" not in table + "".join(legend)


def test_a_summary_that_cannot_be_written_costs_no_table(run, tmp_path, capsys, monkeypatch):
    def full(path, text):
        raise OSError("No space left on device")

    monkeypatch.setattr("attnlab_evaluations.frame.records.write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, seeds=1)
    assert "linearised" in capsys.readouterr().out
