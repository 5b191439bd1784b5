"""The command line of `attnlab compare`: what it means, and one sentence for what means nothing."""

import argparse
import os
import re
import shlex
from datetime import datetime
from pathlib import Path

import pytest

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab_evaluations.tasks.compare import settings

pytestmark = pytest.mark.no_torch

KNOWN = ["minilm", "sweep"]


def goals(*words):
    parser = argparse.ArgumentParser()
    settings.configure(parser)
    return settings.settle_targets(parser.parse_args(["--targets", *words]))


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


def test_names_and_lengths_may_be_separated_by_spaces_too():
    found = settled("--variants", "additive", "flash,chunked", "--lengths", "64", "32", "--workloads", "sweep")
    assert found.variants == ("dot_product", "additive", "flash", "chunked")
    assert (found.lengths, found.workloads) == ((32, 64), ("sweep",))


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (["--variants", "aditive"], UnknownVariant, "no variant is called 'aditive'; did you mean 'additive'"),
        (["--variants", " , "], InvalidInput, "--variants: expected names separated by commas"),
        (["--workloads", "swep"], InvalidInput, "no workload is called 'swep'; did you mean 'sweep'"),
        (["--budget", "soon"], InvalidInput, "--budget: expected a number of 1 or more, got 'soon'"),
        (["--budget", "nan"], InvalidInput, "--budget: expected a number of 1 or more, got 'nan'"),
        (["--budget", "inf"], InvalidInput, "--budget: expected a number"),
        (["--budget", "-5"], InvalidInput, "--budget: expected a number of 1 or more, got '-5'"),
        (["--budget", "0"], InvalidInput, "--budget: expected a number of 1 or more, got '0'"),
        (["--budget", "1e400"], InvalidInput, "--budget: expected a number of 1 or more, got '1e400'"),
        (["--seed", "9" * 5000], InvalidInput, f"whole number of 0 or more, got '{'9' * 40}...'"),
        (
            ["--seed", str(2**32)],
            InvalidInput,
            "--seed: expected a whole number of at most 4294967295, got '4294967296'",
        ),
        (["--seed", "1.5"], InvalidInput, "--seed: expected a whole number of 0 or more, got '1.5'"),
        (["--threads", "1025"], InvalidInput, "--threads: expected a whole number of at most 1024"),
        (["--threads", "9" * 20], InvalidInput, "--threads: expected a whole number of at most 1024"),
        (["--lengths=-64"], InvalidInput, "--lengths: expected a whole number of 1 or more, got '-64'"),
        (["--lengths", "64,1e3"], InvalidInput, "--lengths: expected a whole number of 1 or more, got '1e3'"),
        (
            ["--lengths", str(2**31)],
            InvalidInput,
            "--lengths: expected a whole number of at most 2147483647, got '2147483648'",
        ),
        (["--lengths", ""], InvalidInput, "--lengths: expected names separated by commas, got ''"),
        (["--variants", "["], UnknownVariant, "no variant is called '['; known: additive"),
        (["--workloads", ","], InvalidInput, "--workloads: expected names separated by commas"),
        (["--out", " "], InvalidInput, "--out: expected a folder, got an empty name"),
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


def test_the_greatest_seed_and_length_are_taken_and_doubles_count_once():
    found = settled("--seed", str(2**32 - 1), "--lengths", f"64, 16,,64,{2**31 - 1},16")
    assert found.seed == 2**32 - 1
    assert found.lengths == (16, 64, 2**31 - 1)


def test_a_folder_with_somebodys_own_table_is_not_written_over(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "table.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"paper holds table\.csv, which would be replaced"):
        settled("--out", "paper")


def test_the_folder_is_judged_first_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    for words in ([], ["--out", "new"], ["--targets", "--out", "new"]):
        with pytest.raises(InvalidInput, match="--out: no permission to make"):
            (goals if "--targets" in words else settled)(*words)
    assert list(tmp_path.iterdir()) == []


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
    found = settled("--variants", "flash", "--seed", "7", "--lengths", "64,32", "--out", "my run", "--threads", "2")
    assert found.resume_command() == (
        "attnlab compare --out 'my run' --resume --variants dot_product,flash --workloads minilm,sweep --seed 7 "
        "--lengths 32,64 --budget 220 --threads 2"
    )


def test_nothing_is_made_before_the_arguments_are_judged(tmp_path):
    with pytest.raises(UnknownVariant):
        settled("--variants", "nope", "--out", "new")
    assert list(tmp_path.iterdir()) == []


def test_the_command_to_resume_names_registry_files_and_reads_as_no_other_option():
    parser = argparse.ArgumentParser()
    settings.configure(parser)
    args = parser.parse_args(["--out=-run", "--variants", "flash", "--format", "json"])
    args.registry = ["my rows.yaml", "more.yaml"]
    said = settings.settle(args, KNOWN).resume_command()
    assert said.endswith("--format json --registry 'my rows.yaml' --registry more.yaml")
    again = parser.parse_args(shlex.split(said.split(" --registry")[0])[2:])
    assert Path(again.out) == Path("-run")
    assert again.resume


def test_what_is_recorded_of_a_run_holds_no_names_of_folders_or_files():
    kept = settings.Settings(
        ("a",), ("w",), Path("/home/somebody/run"), registry=("/home/somebody/rows.yaml",)
    ).recorded()
    assert kept["seed"] == 0
    assert "somebody" not in repr(kept)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lengths", "5"], "--targets: --lengths has no use with it; leave it out"),
        (["--device", "cuda"], "--targets: --device has no use with it"),
        (["--variants", ""], "--targets: --variants has no use with it"),
        (["--workloads", "sweep", "--resume"], "--targets: --workloads and --resume have no use with it"),
        (["--budget", "nan"], "--budget: expected a number of 1 or more, got 'nan'"),
        (["--seed", "x"], "--seed: expected a whole number"),
        (["--threads", "0"], "--threads: expected a whole number of 1 or more"),
        (["--out", ""], "--out: expected a folder, got an empty name"),
    ],
)
def test_targets_refuse_what_they_would_ignore_and_what_means_nothing(words, says):
    with pytest.raises(InvalidInput, match=re.escape(says)):
        goals(*words)


def test_targets_take_what_they_use_and_options_at_their_defaults():
    found = goals("--budget", "9", "--seed", "3", "--threads", "2", "--out", "t", "--format", "json", "--device", "cpu")
    assert found == settings.TargetSettings(9.0, 3, 2, Path("t"), "json")
    assert goals() == settings.TargetSettings()


def test_every_option_of_the_command_is_used_or_refused_by_targets():
    parser = argparse.ArgumentParser(add_help=False)
    settings.configure(parser)
    options = {action.dest for action in parser._actions}
    used = set(vars(settings.TargetSettings()))
    assert options == used | set(settings.TARGETS_IGNORE) | {"targets"}


def test_targets_do_not_replace_those_of_an_earlier_run(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "targets.md").write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"--out: t holds targets\.md, which would be replaced"):
        goals("--out", "t")


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"schema": 1, "settings": null}'])
def test_a_run_that_does_not_tell_its_choice_is_not_resumed_with_everything(damaged):  # F23
    a_run("run")
    Path("run", settings.PROVENANCE).write_text(damaged, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"does not tell what the run was asked for; give its --variants"):
        settled("--out", "run", "--resume")
    assert settled("--out", "run", "--resume", "--variants", "flash", "--lengths", "32").lengths == (32,)
