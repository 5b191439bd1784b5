"""`attnlab models` as it is typed: one sentence and exit code 2 for what means nothing; the report; the file that it writes."""

import json

import pytest

import attnlab
from attnlab.cli import main
from attnlab.cli.dispatch import parse
from attnlab_evaluations.tasks.models import report, settings
from attnlab_evaluations.tasks.models.outcome import EQUAL, REFUSED, WORKS, WRONG, Cell


def settled(*words):
    return settings.settle(parse(["models", *words])[1])


@pytest.mark.no_torch
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["linearized"], "models: no variant is called 'linearized'; did you mean 'linearised'"),
        (["flash", "--models", "bort"], "models: no model is called 'bort'; did you mean 'bert'"),
        (["--write", "."], "--write must name a file, got '.': it is a folder"),
        (["--write", "none/x.md"], "there is no folder none"),
    ],
)
def test_what_means_nothing_is_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["models", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.no_torch
def test_names_and_patterns_name_each_once_and_models_keep_their_order():
    chosen = settled("flash", "fl*sh", "--models", "vit", "*bert*")
    assert chosen.variants == ("flash",)
    assert chosen.models == ("bert", "roberta", "vit")
    assert settled().variants == tuple(attnlab.names())
    assert settled().models == settings.MODELS


@pytest.mark.no_torch
def test_help_has_examples(capsys):
    assert main(["models", "--help"]) == 0
    assert "examples:" in capsys.readouterr().out


CELLS = [
    Cell("bert", "dot_product", EQUAL, "", 1e-7),
    Cell("t5", "dot_product", EQUAL, "", 2e-7),
    Cell("bert", "gated", WORKS),
    Cell("t5", "gated", REFUSED, "gated does not support bias= (allowed: no). No other registered variant does"),
]


def test_the_table_has_a_row_a_variant_and_numbered_reasons():
    said = report.text(CELLS, "table").splitlines()
    assert said[0].split() == ["variant", "bert", "t5"]
    assert said[2].split() == ["dot_product", "equal", "equal"]
    assert said[3].split() == ["gated", "works", "refused", "1"]
    assert "1. does not support bias= (allowed: no)" in said
    assert "2.0e-07" in said[-1]


def test_markdown_and_json_say_the_same():
    assert "| gated       | works  | refused 1 |" in report.text(CELLS, "markdown")
    assert json.loads(report.text(CELLS, "json"))[3]["status"] == REFUSED


def test_a_wrong_cell_is_exit_code_1_and_the_file_is_what_was_printed(tmp_path, capsys):
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from attnlab_evaluations.tasks.models.run import run_models

    asked = settings.ModelsSettings(("flash",), ("bert",), "table", tmp_path / "out.txt")
    assert run_models(asked, lambda own, variant: Cell(own.tiny.name, variant, WRONG, "rows leak")) == 1
    printed = capsys.readouterr().out
    assert "WRONG 1" in printed
    assert "1. rows leak" in printed
    assert (tmp_path / "out.txt").read_text() == printed


def test_an_interrupted_run_prints_what_was_done(capsys, tmp_path):
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from attnlab_evaluations.tasks.models.run import run_models

    done = []

    def judged(own, variant):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(variant)
        return Cell(own.tiny.name, variant, EQUAL)

    asked = settings.ModelsSettings(("chunked", "dot_product"), ("bert", "t5"), write=tmp_path / "now.md")
    assert run_models(asked, judged) == 130
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines()[2:4]] == [
        ["chunked", "equal", "equal"],
        ["dot_product", "equal", "not", "run"],
    ]
    assert not asked.write.exists()
