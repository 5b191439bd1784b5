"""`attnlab compare` as it is typed: one sentence and exit code 2 for what means nothing, before any work."""

import os
import subprocess
import sys

import pytest

from attnlab.cli import main

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget"], "argument --budget: expected one argument"),
        (["--budgt", "3"], "unrecognized arguments: --budgt 3"),
        (["extra"], "unrecognized arguments: extra"),
        (["--resume=1"], "--resume: ignored explicit argument '1'"),
        (["--format", "yaml"], "--format: invalid choice: 'yaml'"),
        (["--out"], "argument --out: expected one argument"),
        (["--out", ""], "--out: expected a folder, got an empty name"),
        (["--out", "file"], "--out: expected a folder, got the file file"),
        (["--out", "file/below"], "and file is a file"),
        (["--variants", "dot_prodct"], "no variant is called 'dot_prodct'; did you mean 'dot_product'?"),
        (["--workloads", "swep"], "no workload is called 'swep'; did you mean 'sweep'?"),
        (["--lengths", "0"], "--lengths: expected a whole number of 1 or more, got '0'"),
        (["--budget", "nan"], "--budget: expected a number of 1 or more, got 'nan'"),
        (["--seed", "9" * 5000], "--seed: expected a whole number of 0 or more, got '999"),
        (["--threads", "9" * 20], "--threads: expected a whole number of at most 1024"),
        (["--resume"], "--resume: there is no run in attnlab-runs"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run"),
        (["--targets", "--lengths", "5"], "--targets: --lengths has no use with it; leave it out"),
        (["--targets", "--variants", "flash", "--resume"], "--targets: --variants and --resume have no use"),
        (["--targets", "--out", "file"], "--out: expected a folder, got the file file"),
        (["--targets", "--budget", "-1"], "--budget: expected a number of 1 or more, got '-1'"),
    ],
)
def test_what_means_nothing_is_one_sentence_and_exit_code_2(words, says, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert len(said.err) < 1000  # the names of all variants may be among it
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [["--targets", "--lengths", "5"], ["--out", ""], ["--variants", "nope"]])
def test_a_refusal_does_not_wait_for_torch(words):
    script = "import sys; from attnlab.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script, "compare", *words], capture_output=True, text=True, encoding="utf-8",
        timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]
