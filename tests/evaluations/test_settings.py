"""The command line of `attnlab compare`: what it means, and one sentence for what means nothing."""

import argparse
import re
from datetime import datetime
from pathlib import Path

import pytest

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab_evaluations import settings

pytestmark = pytest.mark.no_torch

KNOWN = ["minilm", "sweep"]


def settled(*words):
    parser = argparse.ArgumentParser()
    settings.configure(parser)
    return settings.settle(parser.parse_args(words), KNOWN, datetime(2026, 1, 2, 3, 4, 5))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def a_run(folder):
    Path(folder).mkdir(parents=True)
    (Path(folder) / "results.jsonl").write_text("", encoding="utf-8")


def test_by_default_every_variant_that_is_no_preset_runs_the_reference_first():
    found = settled()
    assert found.variants[0] == "dot_product"
    assert set(found.variants) == {n for n in attnlab.names() if attnlab.info(n).extends is None}
    assert found.workloads == ("minilm", "sweep")
    assert found.out == Path("attnlab-runs/2026-01-02-030405")
    assert found.lengths == (256, 512, 1024, 2048, 4096)


def test_all_takes_the_presets_too():
    assert set(settled("--variants", "all").variants) == set(attnlab.names())


def test_patterns_and_names_combine_and_the_reference_comes_along():
    found = settled("--variants", "linearised_r*, additive,additive").variants
    assert found == ("dot_product", "linearised_relu", "additive")


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (
            ["--variants", "aditive"],
            UnknownVariant,
            "no variant is called 'aditive'; did you mean 'additive'",
        ),
        (["--variants", " , "], InvalidInput, "--variants: expected names separated by commas"),
        (["--workloads", "swep"], InvalidInput, "no workload is called 'swep'; did you mean 'sweep'"),
        (["--budget", "soon"], InvalidInput, "--budget: expected a number of 1 or more, got 'soon'"),
        (["--budget", "nan"], InvalidInput, "--budget: expected a number of 1 or more, got 'nan'"),
        (["--budget", "inf"], InvalidInput, "--budget: expected a number"),
        (["--seed", "-1"], InvalidInput, "--seed: expected a whole number of 0 or more, got '-1'"),
        (["--threads", "0"], InvalidInput, "--threads: expected a whole number of 1 or more"),
        (["--lengths", "256,x"], InvalidInput, "--lengths: expected a whole number of 1 or more, got 'x'"),
        (["--lengths", "0"], InvalidInput, "--lengths: expected a whole number of 1 or more, got '0'"),
        (["--resume"], InvalidInput, "there is no run in attnlab-runs"),
        (["--resume", "--out", "nowhere"], InvalidInput, "nowhere holds no run"),
    ],
)
def test_wrong_use_is_one_sentence(words, error, says):
    with pytest.raises(error, match=re.escape(says)):
        settled(*words)


def test_a_folder_that_holds_a_run_is_not_written_over():
    a_run("old")
    with pytest.raises(InvalidInput, match="old already holds a run; add --resume"):
        settled("--out", "old")


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match="expected a folder, got the file file"):
        settled("--out", "file")


def test_resume_without_a_folder_takes_the_newest_run():
    a_run("attnlab-runs/2025-12-31-235959")
    a_run("attnlab-runs/2026-01-01-000000")
    assert settled("--resume").out == Path("attnlab-runs/2026-01-01-000000")


def test_the_command_to_resume_says_everything_again():
    found = settled(
        "--variants", "flash", "--seed", "7", "--lengths", "64,32", "--out", "my run", "--threads", "2"
    )
    assert found.resume_command() == (
        "attnlab compare --out 'my run' --resume --variants dot_product,flash --workloads minilm,sweep --seed 7 "
        "--lengths 32,64 --budget 220 --threads 2"
    )


def test_nothing_is_made_before_the_arguments_are_judged(tmp_path):
    with pytest.raises(UnknownVariant):
        settled("--variants", "nope", "--out", "new")
    assert list(tmp_path.iterdir()) == []
