"""F43, F44: what plugins and files bring ends no command but their own, and acts on no terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab._quoting import printable
from attnlab.cli import terminal
from attnlab.hooks import Command
from attnlab.registry import Registry

pytestmark = pytest.mark.no_torch

Run = Callable[..., tuple[int, str, str]]
Offer = Callable[..., Any]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED = [Mute(), BaseException("gone"), GeneratorExit(), SystemExit(3), type("MuteExit", (SystemExit, Mute), {})()]


def raising(error: BaseException) -> Callable[..., Any]:
    def act(*_: object) -> Any:
        raise error

    return act


@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
def test_a_hook_that_raises_anything_leaves_help_and_the_other_commands(
    run: Run, offer: Offer, error: BaseException
) -> None:
    offer(hook=raising(error))
    code, out, err = run("--help")
    assert code == 0
    assert "everything the registry says" in out
    assert f"plugin 'stranger' of strange-package: {type(error).__name__}" in err
    assert run("list", "additive")[0] == 0


@pytest.mark.parametrize("error", [Mute(), BaseException("gone"), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_a_command_that_raises_anything_ends_in_a_sentence(run: Run, offer: Offer, error: BaseException) -> None:
    offer(odd=raising(error))
    code, _, err = run("odd")
    assert (code, f"unexpected {type(error).__name__}" in err) == (3, True)


def test_an_interrupt_is_no_fault_of_a_plugin(run: Run, offer: Offer) -> None:
    offer(hook=raising(KeyboardInterrupt()))
    assert run("--help")[0] == 130


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda parser: parser.add_argument("--registry"), "conflicting option string: --registry; --registry, -h"),
        (lambda parser: parser.add_argument("-h"), "conflicting option string"),
        (raising(Mute()), "cannot be used: Mute"),
        (raising(GeneratorExit()), "cannot be used: GeneratorExit"),
        (lambda parser: parser.add_argument("x", type=raising(Mute())), "cannot be used: Mute"),
    ],
)
def test_arguments_of_a_command_that_cannot_be_used_are_its_plugins_fault(
    run: Run, offer: Offer, configure: Callable[..., Any], words: str
) -> None:
    offer(hook=lambda: [Command("odd", "help", configure, lambda args: 0)])
    code, _, err = run("odd", "3")
    assert code == 2
    assert "odd: the command's arguments" in err
    assert words in err
    assert run("--help")[0] == 0


@pytest.mark.parametrize("name", [None, 3, "two words", "", "-x", "\x1b[31m"])
def test_a_command_without_a_proper_name_or_help_is_left_out(run: Run, offer: Offer, name: Any) -> None:
    offer(
        hook=lambda: [
            Command(name, "help", print, print),
            Command("fine", "100 %(prog) %", print, print),
            Command("no", None, print, print),
        ]
    )  # type: ignore[arg-type]
    code, out, err = run("--help")
    assert code == 0
    assert "100 %(prog) %" in out
    assert "a command's name is a word" in err
    assert "its help is text" in err


ACTING = ["\x1b[31m", "\x1b]0;title\x07", "\u202e", "\u2066", "\r", "\x08", "\x9b31m", "\u200b", "\U000e0041", "\x7f"]


@pytest.mark.parametrize("acting", ACTING, ids=ascii)
def test_what_a_terminal_acts_on_is_shown_as_an_escape(acting: str) -> None:
    shown = printable(f"before {acting} after\n\tnext")
    assert acting not in shown
    assert shown.startswith("before \\")
    assert shown.endswith(" after\n\tnext")
    assert printable(shown) == shown


def test_text_of_every_script_stays_as_it_is() -> None:
    for text in ("café", "加法注意", "می‌خواهم", "👩‍🔬", "a\tb\n"):
        assert printable(text) == text


@pytest.mark.parametrize("acting", ["\u202e", "\u2066", "\u200b"])
@pytest.mark.parametrize(
    "words", [("list",), ("info", "x"), ("doctor",), *(("list", "--format", f) for f in ("csv", "markdown", "json"))]
)
def test_a_registry_files_text_acts_on_no_terminal(
    run: Run, tmp_path: Path, acting: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(
        f"version: 1\nvariants:\n  x: {{target: 'a:B', summary: 's {acting} t', source: 'p {acting}'}}\n",
        encoding="utf-8",
    )
    code, out, err = run("--registry", str(file), *words)
    assert code == 0
    assert acting not in out + err
    if words[-1] == "json":
        assert next(row for row in json.loads(out) if row["name"] == "x")["summary"] == f"s {acting} t"


@pytest.mark.parametrize("acting", ACTING, ids=ascii)
def test_a_plugins_text_acts_on_no_terminal(run: Run, offer: Offer, acting: str) -> None:
    offer(
        hook=lambda: [Command("odd", f"help {acting} text", lambda parser: None, lambda args: print(f"out {acting}."))]
    )
    text = "".join(str(part) for words in (["--help"], ["odd"], ["odd", "--help"]) for part in run(*words))
    assert acting not in text
    offer(odd=raising(RuntimeError(f"words {acting}.")))
    assert acting not in run("odd")[2]


def test_json_of_characters_beyond_the_first_plane_is_json() -> None:
    from attnlab.cli.tables import as_json

    text = "tag \U000e0041 and \x9b"
    assert json.loads(as_json([text])) == [text]
    assert printable(as_json([text])) == as_json([text])


def test_colour_that_a_text_brings_is_none() -> None:
    assert "\x1b" not in terminal.shown("\x1b[31mred")


# F44


def test_long_chains_of_presets_and_many_rows_take_seconds(tmp_path: Path) -> None:
    chain = "".join(f"  v{i}: {{extends: v{i - 1}}}\n" for i in range(1, 2001))
    plain = "".join(f"  w{i}: {{target: 'no_such_{i}:C'}}\n" for i in range(20000))
    file = tmp_path / "attnlab.yaml"
    os.environ["ATTNLAB_TRUST"] = "1"
    try:
        for rows, problems in ((f"  v0: {{target: 'a:C'}}\n{chain}", 1999), (plain, 0)):
            file.write_text(f"version: 1\nvariants:\n{rows}", encoding="utf-8")
            started = time.process_time()
            registry = Registry.default(project_dir=tmp_path)
            mine = [registry.info(name) for name in registry.names() if registry.info(name).layer == "project"]
            assert len(mine) == rows.count("\n")
            assert len([p for p in registry.problems if str(file) in p]) == problems
            assert time.process_time() - started < 20, "measured 2 s for each on a busy machine"
    finally:
        del os.environ["ATTNLAB_TRUST"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locale")
@pytest.mark.parametrize("words", [["list", "x"], ["info", "x"], ["doctor"], ["check", "x"], ["trust", "attnlab.yaml"]])
def test_a_target_that_the_locale_cannot_name_is_one_sentence(tmp_path: Path, words: list[str]) -> None:
    if words[0] == "check":
        pytest.importorskip("torch", reason="checks need torch")
    (tmp_path / "attnlab.yaml").write_text("version: 1\nvariants:\n  x: {target: '注意.py:C'}\n", encoding="utf-8")
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "ATTNLAB_HOME": str(tmp_path),
    }
    environment.pop("PYTHONIOENCODING", None)
    for trusted in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "attnlab", *words],
            cwd=tmp_path,
            capture_output=True,
            env={**environment, "ATTNLAB_TRUST": trusted},
            check=False,
        )
        text = (done.stdout + done.stderr).decode("ascii")
        assert done.returncode in (0, 2), text
        assert "Traceback" not in text
        assert "unexpected" not in text
        assert "no file can have the path of the target" in text


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has the named pipes")
@pytest.mark.parametrize(
    "words",
    [
        ["list", "additive"],
        ["--registry", "attnlab.yaml", "list"],
        ["trust", "attnlab.yaml"],
        ["new", "mine"],
        ["doctor"],
    ],
)
def test_a_pipe_in_the_place_of_a_registry_file_is_one_sentence(tmp_path: Path, words: list[str]) -> None:
    os.mkfifo(tmp_path / "attnlab.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "attnlab", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "expected a regular file, got a pipe, socket or device" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
