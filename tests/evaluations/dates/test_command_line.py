"""`attnlab dates` as it is typed: help, one sentence and exit code 2 for what means nothing, no torch until it trains."""

import os
import shlex
import subprocess
import sys

import pytest

from attnlab.cli import main
from attnlab.cli.dispatch import parse
from attnlab_evaluations.tasks.dates import settings

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settled(*words):
    return settings.settle(parse(["dates", *words])[1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["aditive"], "dates: no variant is called 'aditive'; did you mean 'additive'"),
        (["nothing_like_it"], "no variant is called 'nothing_like_it'"),
        (["--seeds", "0"], "--seeds: expected a whole number of 1 or more, got '0'"),
        (["--seeds", "x"], "--seeds: expected a whole number of 1 or more, got 'x'"),
        (["--steps", "1"], "--steps: expected a whole number of 2 or more, got '1'"),
        (["--steps", "9" * 30], "--steps: expected a whole number of at most 1000000"),
        (["--budget", "nan"], "--budget: expected a number of 1 or more, got 'nan'"),
        (["--beam", "0"], "--beam: expected a whole number of 1 or more, got '0'"),
        (["--length-power", "1"], "--length-power: expected a beam of 2 or more to order, got --beam 1"),
        (["--beam", "2", "--length-power", "-1"], "--length-power: expected a number of 0 or more, got '-1'"),
        (["--examples", "0"], "--examples: expected a whole number of 1 or more, got '0'"),
        (["--threads", "9999"], "--threads: expected a whole number of at most 1024, got '9999'"),
        (["--device", "tpu"], "--device: expected cpu, cuda or cuda:1, got 'tpu'"),
        (["--device", "cpu:3"], "--device: expected cpu, cuda or cuda:1, got 'cpu:3'"),
        (["--beam", "2", "--length-power", ""], "--length-power: expected a number of 0 or more, got ''"),
        (["--cell", "rnn"], "argument --cell: invalid choice: 'rnn'"),
        (["--out", ""], "--out: expected a folder, got an empty name"),
        (["--out", "file"], "--out: expected a folder, got the file file"),
        (["--out", "taken"], "--out: taken holds dates.json, which would be replaced"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_what_means_nothing_is_one_sentence_and_exit_code_2(words, says, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "dates.json").write_text("mine", encoding="utf-8")
    assert main(["dates", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


def test_a_refusal_does_not_wait_for_torch():
    script = "import sys; from attnlab.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script, "dates", "aditive"], capture_output=True, text=True, encoding="utf-8",
        timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]


def test_help_has_examples_that_are_understood(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["dates", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    commands = [line.split("  ")[1] for line in said.splitlines() if line.startswith("  attnlab dates")]
    assert len(commands) >= 5
    for command in commands:
        assert settled(*shlex.split(command)[2:]).variants[0] == "none"


def test_the_default_is_the_two_learned_variants_beside_none():
    found = settled()
    assert found.variants == ("none", "additive", "multiplicative")
    assert (found.seeds, found.examples, found.threads, found.beam) == (3, 500, 2, 1)
    assert found.out.parts[:2] == ("attnlab-runs", "dates")


def test_patterns_presets_and_repeated_names_are_understood():
    assert settled("linearised*").variants[:2] == ("none", "linearised")
    assert settled("additive", "none", "additive").variants == ("none", "additive")


def test_the_command_to_go_on_means_the_same_run():
    words = ["dot_product", "--out", "a b", "--seeds", "2", "--steps", "9", "--budget", "7", "--examples", "5"]
    words += ["--threads", "1", "--cell", "lstm", "--no-input-feeding", "--beam", "3", "--length-power", "0.5"]
    words += ["--device", "cuda:1", "--check", "--format", "json"]
    found = settled(*words)
    assert found.recipe.cell == "lstm"
    assert not found.recipe.input_feeding
    assert settled(*shlex.split(found.resume_command())[2:]) == found


def test_what_is_recorded_names_no_folder(tmp_path):
    assert str(tmp_path) not in str(settled("--out", str(tmp_path / "x")).recorded())
