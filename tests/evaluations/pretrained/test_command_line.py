"""`attnlab minilm` as it is typed: help, one sentence and exit code 2 for what means nothing, no torch until it runs."""

import os
import shlex
import subprocess
import sys

import pytest

import attnlab
from attnlab.cli import main
from attnlab.cli.dispatch import parse
from attnlab_evaluations.tasks.minilm import settings

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settled(*words):
    return settings.settle(parse(["minilm", *words])[1])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["linearized"], "minilm: no variant is called 'linearized'; did you mean 'linearised'"),
        (["--distil", "linearized"], "--distil: no variant is called 'linearized'"),
        (["--distil", "linearised*"], "--distil: expected one variant, got 'linearised*', which matches "),
        (["flash", "--distil", "linearised"], "--distil: expected no other names, got flash"),
        (["--save"], "--save: expected --distil, which makes the models to save"),
        (["--seeds", "0"], "--seeds: expected a whole number of 1 or more, got '0'"),
        (["--steps", "1"], "argument --steps: expected 2 arguments"),
        (["--steps", "1", "x"], "--steps: expected a whole number of 0 or more, got 'x'"),
        (["--sentences", "2"], "--sentences: expected a whole number of 3 or more, got '2'"),
        (["--budget", "nan"], "--budget: expected a number of 1 or more, got 'nan'"),
        (["--threads", "9999"], "--threads: expected a whole number of at most 1024, got '9999'"),
        (["--out", "file"], "--out: expected a folder, got the file file"),
        (["--out", "taken"], "--out: taken holds minilm.json, which would be replaced"),
        (
            ["--distil", "linearised:feature_map=exp", "--save", "--out", "own"],
            "--out: own holds linearised-feature_map-exp-seed2, which would be replaced",
        ),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_what_means_nothing_is_one_sentence_and_exit_code_2(words, says, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "minilm.json").write_text("mine", encoding="utf-8")
    (tmp_path / "own" / "linearised-feature_map-exp-seed2").mkdir(parents=True)
    assert main(["minilm", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "own", "taken"]


def test_a_refusal_does_not_wait_for_torch():
    script = "import sys; from attnlab.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script, "minilm", "linearized"], capture_output=True, text=True, encoding="utf-8",
        timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]


def test_help_has_examples_that_are_understood(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["minilm", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    commands = [line.split("  ")[1] for line in said.splitlines() if line.startswith("  attnlab minilm")]
    assert len(commands) >= 5
    for command in commands:
        assert settled(*shlex.split(command)[2:]).variants


def test_the_default_is_every_registered_variant():
    found = settled()
    assert {chosen.label for chosen in found.variants} == set(attnlab.names())
    assert not found.distil
    assert found.out.parts[:2] == ("attnlab-runs", "minilm")


def test_distil_alone_teaches_hedgehog_in_at_most_two_minutes():
    found = settled("--distil")
    assert [chosen.label for chosen in found.variants] == ["linearised_hedgehog"]
    assert (found.distil, found.seeds, found.threads, found.budget) == (True, 3, 2, 120)


@pytest.mark.parametrize(
    "words",
    [
        ["linearised*", "--check", "--sentences", "9", "--format", "json", "--out", "here"],
        ["--distil", "linearised:feature_map=exp", "--steps", "3", "0", "--save", "--out=-x", "--threads", "1"],
    ],
)
def test_the_command_to_go_on_means_the_same_run(words):
    found = settled(*words)
    again = settled(*shlex.split(found.resume_command())[2:])
    assert {**vars(again), "out": None} == {**vars(found), "out": None}
    assert again.out.resolve() == found.out.resolve()
