"""Verdicts on goals, without timing anything; and what provenance finds in and out of a checkout."""

import json
import subprocess

import pytest
import torch

from attnlab import PluginError
from attnlab_evaluations.frame import provenance
from attnlab_evaluations.measure.timing import Interval, Measurement
from attnlab_evaluations.tasks.compare.settings import TargetSettings
from attnlab_evaluations.tasks.targets import goals
from attnlab_evaluations.tasks.targets import run as targets


def target(low, high, goal):
    return targets.Target("what", "peer", Interval((low + high) / 2, low, high), "x", goal)


@pytest.mark.parametrize(
    ("low", "high", "goal", "verdict"),
    [
        (0.9, 1.0, 1.0, "met"),
        (1.01, 1.2, 1.0, "missed"),
        (0.9, 1.1, 1.0, "within noise"),
        (5.0, 6.0, None, "no goal"),
        (float("nan"), float("nan"), 1.0, "not measured"),
    ],
)
def test_a_goal_is_met_only_with_its_whole_interval(low, high, goal, verdict):
    assert target(low, high, goal).verdict == verdict


def test_the_table_shows_measured_goal_and_verdict():
    text = targets.render([target(0.9, 1.0, 1.03), target(5.0, 6.0, None)], "github")
    assert "0.95 [0.9, 1] x" in text
    assert "<= 1.03 x" in text
    assert "| none" in text


@pytest.mark.parametrize(("goal", "code"), [(1.0, 0), (0.5, 1)])
def test_a_missed_goal_is_exit_code_1_and_the_files_are_written(goal, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "measure_targets", lambda *_: [target(0.9, 1.0, goal)])
    assert targets.run_targets(TargetSettings(5.0, out=tmp_path / "t", form="json")) == code
    assert json.loads(capsys.readouterr().out)["targets"][0]["goal"] == goal
    assert {p.name for p in (tmp_path / "t").iterdir()} == {"targets.json", "targets.md"}


def test_control_c_writes_nothing_and_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "measure_targets", interrupted)
    assert targets.run_targets(TargetSettings(5.0, out=tmp_path / "t" / "deep")) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    def broken(*_):
        raise PluginError("no")

    monkeypatch.setattr(targets, "measure_targets", broken)
    with pytest.raises(PluginError):
        targets.run_targets(TargetSettings(5.0, out=tmp_path / "t" / "deep"))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_too_small_for_anything_says_not_measured_in_each_row(monkeypatch):
    monkeypatch.setattr(goals, "measure", lambda *_, **__: Measurement())
    monkeypatch.setattr(targets, "start_up", list)
    monkeypatch.setattr(targets, "interface_goals", lambda *_: [])  # they need transformers, and tests of their own
    monkeypatch.setattr(targets, "random_inputs", lambda heads, length, width: [torch.zeros(1, 1, 1, 1)] * 3)
    found = targets.measure_targets(1.0, 0, lambda _: None)
    assert len(found) == 25
    assert {t.verdict for t in found} == {"not measured"}
    text = targets.render(found, "github")
    assert text.count("no time left; give more --budget") == 25
    assert "nan" not in text


def test_what_raises_while_it_is_timed_is_not_taken_for_a_lack_of_time():
    def broken():
        raise RuntimeError("kernel fell over")

    with pytest.raises(RuntimeError, match="kernel fell over"):
        goals.time_calls({"a": broken}, "a", 1.0, 0)


def test_a_python_that_does_not_start_is_one_sentence():
    with pytest.raises(PluginError, match="a fresh Python failed at start-up: ValueError: no such thing"):
        targets._python("-c", "raise ValueError('no such thing')")
    assert targets._python("-c", "print('fine')") == "fine"


def test_an_unmeasured_row_without_a_goal_is_not_measured_either():
    assert target(float("nan"), float("nan"), None).verdict == "not measured"


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "module.py").write_text("x = 1\n", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_a_clean_checkout_gives_its_commit(checkout):
    found = provenance.commit(checkout / "module.py")
    assert len(found["commit"]) == 40
    assert found["dirty"] is False


def test_an_edited_checkout_is_dirty(checkout):
    (checkout / "module.py").write_text("x = 2\n", encoding="utf-8")
    assert provenance.commit(checkout / "module.py")["dirty"] is True


def test_an_untracked_copy_inside_somebody_elses_checkout_has_no_commit(checkout):
    (checkout / "installed.py").write_text("", encoding="utf-8")
    assert provenance.commit(checkout / "installed.py") == {"commit": None, "dirty": None}


def test_outside_a_checkout_and_without_git_there_is_no_commit(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("", encoding="utf-8")
    assert provenance.commit(tmp_path / "module.py") == {"commit": None, "dirty": None}
    monkeypatch.setenv("PATH", "")
    assert provenance.commit(tmp_path / "module.py") == {"commit": None, "dirty": None}


def test_the_source_digest_changes_with_any_edit_and_with_nothing_else(tmp_path, monkeypatch):
    package = tmp_path / "digested_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = provenance.source_digest(["digested_package", "not_installed_at_all"])
    (package / "notes.txt").write_text("prose", encoding="utf-8")
    assert provenance.source_digest(["digested_package"]) == first
    (package / "rows.yaml").write_text("a: 1", encoding="utf-8")
    assert provenance.source_digest(["digested_package"]) != first


def test_a_missing_distribution_has_no_version():
    assert provenance.version("no-such-distribution-anywhere") is None
    assert provenance.version("torch")
