"""The run folder: what may be one, judged before any work; made whole, and taken away where nothing came of it."""

import os
import sys
from datetime import datetime
from pathlib import Path

import pytest

from attnlab import InvalidInput
from attnlab_evaluations.frame import folders, run_folder

pytestmark = pytest.mark.no_torch


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_an_empty_name_is_no_folder(text):
    with pytest.raises(InvalidInput, match="--out: expected a folder, got an empty name; leave --out out"):
        folders.asked_for(text)


@pytest.mark.parametrize("text", ["new", "new/deeper/still", "./new/../other", "日本語", "-run", "with space"])
def test_judging_a_folder_makes_nothing(text, tmp_path):
    assert folders.asked_for(text) == Path(text)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_and_holds_none(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match="expected a folder, got the file file; choose another name"):
        folders.asked_for("file")
    inside = os.path.join("file", "below", "it")
    with pytest.raises(InvalidInput, match=r"expected a folder, got .*, and file is a file"):
        folders.asked_for(inside)


@pytest.mark.parametrize(("text", "says"), [("kept", "write to kept"), ("kept/new", "make .*new in kept")])
def test_a_folder_without_permission_to_write_is_refused_before_any_work(text, says, tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "kept" not in str(path))
    with pytest.raises(InvalidInput, match=f"--out: no permission to {says}; choose another folder"):
        folders.asked_for(text)


def test_a_name_that_is_too_long_is_refused_and_repeated_in_part():
    with pytest.raises(InvalidInput, match="--out: cannot make the folder") as caught:
        folders.make(folders.asked_for("a" * 5000))
    assert len(str(caught.value)) < 300


def test_a_name_with_a_null_character_is_refused():
    with pytest.raises(InvalidInput, match="--out: cannot make the folder"):
        folders.make(folders.asked_for("a\0b"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the folder that a process is in")
def test_a_working_folder_that_was_taken_away_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(InvalidInput, match="--out: cannot make the folder run"):
        folders.asked_for("run")


def test_a_tilde_that_the_shell_left_alone_is_the_users_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    assert folders.asked_for("~/run") == tmp_path / "home" / "run"
    assert folders.asked_for("~run") == Path("~run")


def test_a_new_default_folder_never_is_one_that_exists(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    names = []
    for _ in range(3):
        out = folders.fresh(now)
        names.append(out.name)
        out.mkdir(parents=True)
    assert names == ["2026-01-02-030405", "2026-01-02-030405-2", "2026-01-02-030405-3"]


def test_what_was_made_is_taken_away_again_and_nothing_else(tmp_path):
    (tmp_path / "mine").mkdir()
    made = folders.make(Path("mine/a/b"))
    assert Path("mine/a/b").is_dir()
    folders.unmake(made)
    assert [p.name for p in tmp_path.rglob("*")] == ["mine"]


def test_a_folder_with_something_in_it_stays(tmp_path):
    made = folders.make(Path("a/b"))
    (tmp_path / "a" / "note").write_text("", encoding="utf-8")
    folders.unmake(made)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "note"]


def test_making_a_folder_that_exists_owns_nothing(tmp_path):
    (tmp_path / "mine").mkdir()
    assert folders.make(Path("mine")) == []


def test_a_folder_that_cannot_be_made_leaves_none_of_those_above_it(tmp_path, monkeypatch):
    real = os.mkdir

    def mkdir(path, *rest, **more):
        if os.path.basename(path) == "b":
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(InvalidInput, match=r"--out: cannot make the folder .*b: Permission denied"):
        folders.make(Path("a/b"))
    assert list(tmp_path.iterdir()) == []


def test_somebodys_own_files_are_not_replaced(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "table.md").write_text("mine", encoding="utf-8")
    folders.refuse_replacing(Path("paper"), ["table.csv"])
    with pytest.raises(InvalidInput, match=r"--out: paper holds table\.md, which would be replaced"):
        folders.refuse_replacing(Path("paper"), ["table.csv", "table.md"])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_a_name_that_is_not_utf8_can_be_a_folder():
    out = folders.asked_for(os.fsdecode(b"caf\xe9"))
    folders.make(out)
    assert os.listdir(b".") == [b"caf\xe9"]


def test_a_folder_to_go_on_in_is_the_named_one_or_a_fresh_one():
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert folders.to_go_on_in(None, "dates", now) == Path("attnlab-runs/dates/2026-01-02-030405")
    assert folders.to_go_on_in("mine", "dates", now) == Path("mine")


def test_a_folder_without_a_run_keeps_somebodys_own_summary(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "dates.json").write_text("", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"mine holds dates\.json, which would be replaced"):
        run_folder.refuse_replacing(Path("mine"), "dates.json", ["dates.json"])
    (tmp_path / "mine" / folders.RESULTS).write_text("", encoding="utf-8")
    run_folder.refuse_replacing(Path("mine"), "dates.json", ["dates.json"])
