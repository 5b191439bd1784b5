"""Atomic writes, durable appends, and where the user's own files are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attnlab import _files
from attnlab._files import append_line_durable, config_dir, read_regular, write_text_atomic

pytestmark = pytest.mark.no_torch


def test_an_atomic_write_makes_the_file_and_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "表.md"
    write_text_atomic(path, "α\r\nβ\n")
    assert path.read_bytes() == "α\r\nβ\n".encode()


def test_an_atomic_write_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_text("old and longer", encoding="utf-8")
    write_text_atomic(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_atomic_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "f.txt"
    path.write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(_files.os, failing, fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_text_atomic(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["f.txt"]
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.skipif(sys.platform == "win32", reason="links and permission bits are POSIX's")
def test_an_atomic_write_keeps_a_link_and_the_permission_bits(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old", encoding="utf-8")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text_atomic(link, "new")
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_appended_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "results.jsonl"
    append_line_durable(path, '{"a": 1}')
    append_line_durable(path, '{"b": "é"}')
    assert path.read_bytes() == '{"a": 1}\n{"b": "é"}\n'.encode()


def test_a_torn_last_line_spoils_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    append_line_durable(path, '{"c": 3}')
    assert path.read_text(encoding="utf-8").splitlines() == ['{"a": 1}', '{"b": ', '{"c": 3}']


@pytest.mark.parametrize("line", ["a\nb", "a\r", "\n"])
def test_a_line_with_a_line_break_is_refused_and_nothing_is_written(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(ValueError, match="no line break"):
        append_line_durable(path, line)
    assert not path.exists()


def test_a_regular_file_is_read_whole_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "f.bin"
    path.write_bytes(b"\0" * 1024)
    assert read_regular(path, 1024) == b"\0" * 1024
    with pytest.raises(OSError, match="larger than"):
        read_regular(path, 1023)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("folder", "expected a file, got a folder"),
        ("nothing", "there is no such file"),
        ("NUL", "no file can have this path"),
        ("pipe", "expected a regular file, got a pipe"),
        ("device", "expected a regular file, got a pipe, socket or device"),
        ("broken link", "it is a link to .*gone, which does not exist"),
        ("link to itself", "symbolic link"),
    ],
)
def test_what_is_no_regular_file_is_refused_in_words_and_never_waited_for(
    tmp_path: Path, kind: str, words: str
) -> None:
    if sys.platform == "win32" and kind not in ("folder", "nothing", "NUL"):
        pytest.skip("pipes and devices with a path are POSIX's, and making a link needs a privilege here")
    path = tmp_path / "f"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "broken link":
        path.symlink_to(tmp_path / "gone")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "NUL":
        path = tmp_path / "a\0b"
    with pytest.raises(OSError, match=words) as caught:
        read_regular(path, 1024)
    assert str(path) not in (caught.value.strerror or ""), "the caller names the path"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has the named pipes")
def test_a_pipe_that_takes_a_files_place_after_the_look_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    os.mkfifo(path)
    monkeypatch.setattr(_files.stat, "S_ISREG", lambda mode: True)
    writer = os.open(path, os.O_RDWR)  # who might write some day
    try:
        with pytest.raises(OSError, match="makes its reader wait"):
            read_regular(path, 1024)
    finally:
        os.close(writer)


def test_the_home_variable_names_the_config_folder() -> None:
    assert config_dir({"ATTNLAB_HOME": "/somewhere/else"}) == Path("/somewhere/else")


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {}, ".config/attnlab"),
        ("linux", {"XDG_CONFIG_HOME": "relative/is/ignored"}, ".config/attnlab"),
        ("darwin", {"XDG_CONFIG_HOME": "/x"}, "Library/Application Support/attnlab"),
        ("win32", {}, "AppData/Roaming/attnlab"),
    ],
)
def test_each_platform_has_its_standard_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, environ: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(_files.sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert config_dir(environ) == tmp_path / expected


def test_xdg_and_appdata_are_honoured_where_they_mean_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_files.sys, "platform", "linux")
    assert config_dir({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "attnlab"
    monkeypatch.setattr(_files.sys, "platform", "win32")
    assert config_dir({"APPDATA": str(tmp_path)}) == tmp_path / "attnlab"


def test_a_user_without_a_home_has_no_config_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.setattr(_files.sys, "platform", "linux")
    assert config_dir({}) is None


def test_asking_for_the_config_folder_makes_nothing(tmp_path: Path) -> None:
    config_dir({"ATTNLAB_HOME": str(tmp_path / "new")})
    assert os.listdir(tmp_path) == []
