"""Whole runs on two layers: records, resuming, tables, goals, refusals, and a saved student that is read back."""

import json
from types import SimpleNamespace

import pytest
import torch

from attnlab import InvalidInput, VariantUnavailable
from attnlab.integrations import transformers as hf
from attnlab_evaluations.tasks.compare.workloads import minilm
from attnlab_evaluations.tasks.minilm import distilling, report
from attnlab_evaluations.tasks.minilm.agreement import embed


def lines(out, metric):
    text = (out / "results.jsonl").read_text(encoding="utf-8")
    return [record for record in map(json.loads, text.splitlines()) if record["metric"] == metric]


def never(*_, **__):
    raise AssertionError("done again")


def rows(text):
    return {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}


def test_a_swap_leaves_one_record_a_variant_a_summary_and_a_table(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(tmp_path, "dot_product", "linearised", "additive", check=True) == 0
    cells = lines(tmp_path, "swapped")
    assert [(c["variant"], c["status"]) for c in cells] == [
        ("dot_product", "ok"), ("linearised", "ok"), ("additive", "ok")
    ]  # fmt: skip
    exact, linear, learned = (c["value"] for c in cells)
    assert exact["difference"] <= 1e-5
    assert exact["nearest"] == 1
    assert linear["cosine"] < 0.999
    assert (exact["learned"], linear["learned"]) == (0, 0)
    assert learned["learned"] > 1000
    said = capsys.readouterr()
    assert "goal: dot_product within 1e-05: reached" in said.out
    assert "goal: linearised" not in said.out
    assert rows(said.out)["additive"][-2:] == [str(learned["learned"]), "ok"]
    assert said.err == ""
    assert {p.name for p in tmp_path.iterdir()} == {"results.jsonl", "minilm.json"}
    summary = json.loads((tmp_path / "minilm.json").read_text(encoding="utf-8"))
    assert summary["cells"] == cells


def test_finished_cells_are_not_done_again(run, tmp_path, capsys, monkeypatch):
    run(tmp_path, "linearised")
    first = capsys.readouterr().out
    monkeypatch.setattr(distilling, "installed", never)
    assert run(tmp_path, "linearised") == 0
    assert capsys.readouterr().out == first
    run(tmp_path, "linearised:feature_map=exp")
    assert "wrong: AssertionError: done again" in capsys.readouterr().out


def test_a_variant_that_cannot_take_the_place_says_why(run, tmp_path, capsys, monkeypatch):
    from attnlab import UnsupportedRequest

    def refused(*_, **__):
        raise UnsupportedRequest("linearised: it will not")

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(distilling, "installed", refused)
    run(tmp_path, "linearised")
    said = capsys.readouterr().out
    assert "unsupported: linearised: it will not" in said
    assert rows(said)["linearised"][1:7] == ["n/a"] * 6


def test_an_exact_variant_that_moves_the_embeddings_misses_its_goal(run, tmp_path, capsys, monkeypatch):
    true = distilling.installed

    def off(teacher, chosen, seed):
        model = true(teacher, chosen, seed)
        with torch.no_grad():
            model.encoder.layer[0].attention.self.query.weight *= 1.01
        return model

    monkeypatch.setattr(distilling, "installed", off)
    assert run(tmp_path / "a", "dot_product") == 0
    assert run(tmp_path / "b", "dot_product", check=True) == 1
    assert "goal: dot_product within 1e-05: missed" in capsys.readouterr().out


def test_a_variant_that_fails_its_checks_gets_no_numbers_and_misses_its_goal(run, tmp_path, capsys):
    def failing(name, **_):
        return [SimpleNamespace(check="values", status="failed", message="it is off")]

    assert run(tmp_path, "dot_product", checks=failing, check=True) == 1
    said = capsys.readouterr().out
    assert "wrong: conformance: values" in said
    assert "goal: dot_product within 1e-05: missed (n/a)" in said


def test_a_distillation_leaves_one_record_a_seed_with_every_stage(run, tmp_path, capsys):
    assert run(tmp_path, "linearised_hedgehog", distil=True, seeds=2) == 0
    cells = lines(tmp_path, "distilled")
    assert [(c["seed"], c["status"]) for c in cells] == [(0, "ok"), (1, "ok")]
    for cell in cells:
        value = cell["value"]
        assert (len(value["weight_losses"]), len(value["state_losses"])) == (2, 1)
        assert len({value[stage]["cosine"] for stage in ("words", "before", "weights", "after")}) == 4
        assert value["after"]["cosine"] > value["before"]["cosine"]
    said = capsys.readouterr().out
    assert "linearised_hedgehog: 2 seeds, least-most;" in said
    assert rows(said)["untrained"][1] == f"{cells[0]['value']['before']['cosine']:.3f}"
    assert run(tmp_path, "linearised_hedgehog", distil=True, seeds=2, trainer=never) == 0
    assert capsys.readouterr().out == said


def test_a_distillation_below_its_goal_is_exit_code_1(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "COSINE", 0.9999)
    assert run(tmp_path, "linearised", distil=True, check=True) == 1
    assert "goal: linearised a cosine of at least 0.9999: missed" in capsys.readouterr().out
    monkeypatch.setattr(report, "COSINE", 0.1)
    assert run(tmp_path, "linearised", distil=True, check=True, trainer=never) == 0


def test_a_variant_without_weights_says_so_and_learns_by_the_second_stage_alone(run, tmp_path, tiny, capsys):
    assert run(tmp_path, "delta_rule", distil=True) == 0
    said = capsys.readouterr().out
    assert "delta_rule, seed 0: unsupported: delta_rule does not support need_weights=True" in said
    assert rows(said)["untrained"][1:] == ["n/a"] * 4
    assert run(tmp_path, "delta_rule", distil=True, recipe=tiny(weight_steps=0)) == 0
    value = lines(tmp_path, "distilled")[-1]["value"]
    assert value["weights"] == value["before"] != value["after"]


def test_time_that_is_up_is_said_with_the_command_to_go_on(run, tmp_path, capsys):
    from attnlab_evaluations.frame.trained_cells import OverBudget

    def slow(*_, **__):
        raise OverBudget("9 s were up after 1 of 3 steps")

    run(tmp_path, "linearised_hedgehog", distil=True, trainer=slow)
    said = capsys.readouterr().out
    assert "linearised_hedgehog, seed 0: over budget: 9 s were up after 1 of 3 steps" in said
    assert "go on with what is missing: attnlab minilm --out" in said


def test_a_saved_student_read_back_gives_the_same_embeddings(run, tmp_path, encoder):
    made = []

    def keep(*asked, **more):
        made.append(distilling.distil(*asked, **more))
        return made[-1]

    run(tmp_path, "linearised_hedgehog", distil=True, save=True, trainer=keep)
    folder = tmp_path / "linearised_hedgehog-seed0"
    model = hf.load(folder).eval()
    tokenizer = type(encoder.tokenizer).from_pretrained(folder)
    found = embed(model, tokenizer, encoder.sentences)
    assert found.equal(embed(made[0].model, encoder.tokenizer, encoder.sentences))
    assert not found.equal(embed(encoder.model, encoder.tokenizer, encoder.sentences))


def test_a_run_that_did_not_save_is_no_answer_to_one_that_does(run, tmp_path):
    run(tmp_path, "linearised", distil=True)
    assert not (tmp_path / "linearised-seed0").exists()
    run(tmp_path, "linearised", distil=True, save=True)
    assert (tmp_path / "linearised-seed0" / "config.json").exists()


def test_json_on_stdout_is_the_summary(run, tmp_path, capsys):
    run(tmp_path, "dot_product", form="json")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "minilm.json").read_text("utf-8"))


def test_an_interruption_names_the_command_to_go_on(run, tmp_path, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    assert run(tmp_path, "linearised", distil=True, trainer=stopped) == 130
    assert "go on with: attnlab minilm --out" in capsys.readouterr().err


def test_what_cannot_be_is_said_before_anything_is_made(run, tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match="feature_map must be one of"):
        run(tmp_path / "new", "linearised:feature_map=sine")
    monkeypatch.setattr(minilm.MiniLM, "unavailable", lambda self: "needs the package x")
    with pytest.raises(VariantUnavailable, match="minilm: needs the package x"):
        run(tmp_path / "new", "linearised")
    assert not (tmp_path / "new").exists()
