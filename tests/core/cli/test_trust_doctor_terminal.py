"""`attnlab trust`, `attnlab doctor`, and what the command line does with a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab.cli import terminal

pytestmark = pytest.mark.no_torch

Run = Callable[..., tuple[int, str, str]]
Offer = Callable[..., Any]


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


def test_trust_lists_what_may_run_now_and_forget_takes_it_back(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
    path = tmp_path / "attnlab.yaml"
    path.write_text("version: 1\nvariants:\n  mine:\n    target: mine.py:Mine\n", encoding="utf-8")
    code, out, _ = run("trust", str(path))
    assert code == 0
    assert out.splitlines() == [f"trusted: {path}", f"  runs: {tmp_path / 'mine.py'}"]
    assert run("trust", str(path), "--forget")[1] == f"{path}: no longer trusted\n"
    assert run("trust", str(path), "--forget")[1] == f"{path}: was not trusted\n"


def test_doctor_lists_versions_plugins_and_files_in_order(
    run: Run, rows: str, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlab.cli import doctor_command

    monkeypatch.setattr(doctor_command, "ask_torch", lambda: (None, "torch cannot be imported: gone"))
    manager = offer()
    manager.add("broken", "broken-package", raising(ImportError("no module x")))
    code, out, _ = run("doctor", "--registry", rows, "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["versions"]["Python"].startswith(sys.version.split()[0])
    assert [file["layer"] for file in found["registry_files"]][-1] == "named"
    assert found["registry_files"][-1]["path"] == rows
    assert [(p["name"], p["problem"] is None) for p in found["plugins"]] == [("stranger", True), ("broken", False)]
    assert any("broken-package" in problem and "no module x" in problem for problem in found["problems"])
    assert "torch cannot be imported: gone" in found["problems"]
    code, out, _ = run("doctor", "--registry", rows)
    assert code == 0
    for part in ("versions", "plugins", "registry files, lowest layer first", "problems: ", rows):
        assert part in out


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_and_not_for_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.paint("x", "red") == "x"
    monkeypatch.setattr(sys, "stdout", Screen())
    with terminal.escaping():
        print(terminal.paint("x", "red"), end="")
        screen = terminal.raw(sys.stdout)
    assert isinstance(screen, Screen)
    assert screen.getvalue() == "\033[31mx\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.paint("x", "red") == "x"


def test_progress_is_silent_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    with terminal.progress("working"):
        pass
    assert capsys.readouterr().err == ""


def test_progress_shows_on_a_terminal_after_a_while_and_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    screen, written = Screen(), threading.Event()
    plain = screen.write
    monkeypatch.setattr(screen, "write", lambda text: (plain(text), written.set())[0])
    monkeypatch.setattr(terminal, "PATIENCE", 0.001)
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.progress("working"):
        assert written.wait(30)
    assert "working ... 0 s" in screen.getvalue()
    assert screen.getvalue().endswith("\r\033[K")
