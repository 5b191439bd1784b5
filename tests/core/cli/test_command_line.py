"""The command line as a whole: exit codes, one sentence for what is typed wrong, faults of plugins and of ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab import catalogue
from attnlab.cli import terminal
from attnlab.errors import InvalidInput

pytestmark = pytest.mark.no_torch

Run = Callable[..., tuple[int, str, str]]
Offer = Callable[..., Any]


@pytest.mark.parametrize(
    "words", [("--registry", "{}", "list"), ("list", "--registry", "{}"), ("--registry={}", "list")]
)
def test_a_registry_file_may_stand_before_or_after_the_command(run: Run, rows: str, words: tuple[str, ...]) -> None:
    text = Path(rows).read_text(encoding="utf-8").replace("additive", "mine")
    Path(rows).write_text(text, encoding="utf-8")
    code, out, _ = run(*(word.format(rows) for word in words), "--format", "json")
    names = [row["name"] for row in json.loads(out)]
    assert code == 0
    assert {"mine", "mine_64", "dot_product"} <= set(names)
    assert "mine" not in catalogue.names(), "only for that one command"


def test_the_registry_file_reaches_child_processes(run: Run, rows: str, offer: Offer) -> None:
    seen = {}
    offer(look=lambda args: seen.update(env=os.environ.get("ATTNLAB_REGISTRY")) or 0)
    assert run("look", "--registry", rows)[0] == 0
    assert seen["env"] == rows
    assert "ATTNLAB_REGISTRY" not in os.environ


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["lst"], "did you mean 'list'"),
        (["list", "--formt", "json"], "--formt"),
        (["list", "--format", "jsn"], "jsn"),
        (["info"], "NAME"),
        (["check"], "NAME"),
        (["trust"], "FILE"),
        (["--registry"], "--registry"),
        (["--nonsense", "list"], "--nonsense"),
        (["list", "--registry", "nowhere.yaml"], "nowhere.yaml"),
        (["--registry", "", "list"], "folder"),
        (["trust", "nowhere.yaml"], "nowhere.yaml"),
        (["check", "z*"], "no registered variant matches"),
        (["", ""], "no command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_typed_wrong_gives_one_sentence_and_exit_code_2(run: Run, words: list[str], part: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert part in err
    sentences = [line for line in err.splitlines() if "attnlab: note:" not in line]
    assert len(sentences) == 1
    assert sentences[0].startswith("attnlab: ")


HUGE = "x" * 90_000
WORDY = "many words " * 9_000


@pytest.mark.parametrize("huge", [HUGE, WORDY, f"{HUGE}*", f"/{HUGE}"], ids=["word", "words", "pattern", "path"])
@pytest.mark.parametrize(
    "words",
    [
        ["{}"],
        ["list", "{}"],
        ["list", "--can", "{}"],
        ["list", "--format", "{}"],
        ["list", "--format={}"],
        ["list", "--{}"],
        ["list", "--registry", "{}"],
        ["--registry", "{}", "list"],
        ["--registry={}", "list"],
        ["--{}", "list"],
        ["info", "{}"],
        ["info", "dot_product", "{}"],
        ["check", "{}"],
        ["check", "dot_product", "--device", "{}"],
        ["check", "dot_product", "--device", "cpu:{}"],
        ["doctor", "{}"],
        ["trust", "{}"],
    ],
    ids=" ".join,
)
def test_a_huge_word_is_cut_in_the_sentence(run: Run, words: list[str], huge: str) -> None:
    code, out, err = run(*(word.format(huge) for word in words))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert len(err) < 1500


@pytest.mark.parametrize("kind", ["folder", "pipe", "broken link"])
@pytest.mark.parametrize("words", [["trust", "{}"], ["--registry", "{}", "list"]], ids=" ".join)
def test_a_path_that_is_no_file_is_named_once(run: Run, tmp_path: Path, words: list[str], kind: str) -> None:
    if sys.platform == "win32" and kind != "folder":
        pytest.skip("pipes with a path are POSIX's, and making a link needs a privilege here")
    path = tmp_path / "odd.yaml"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    code, out, err = run(*(word.format(path) for word in words))
    assert (code, out) == (2, "")
    assert err.startswith(f"attnlab: {path}: ")
    assert err.count("odd.yaml") == 1
    assert len(err.splitlines()) == 1


def test_a_found_file_that_is_a_pipe_is_a_note_and_the_other_layers_are_listed(run: Run, tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("pipes with a path are POSIX's")
    os.mkfifo(tmp_path / "attnlab.yaml")
    code, out, err = run("list")
    assert code == 0
    assert "dot_product" in out
    assert err.startswith("attnlab: note: ")
    assert "got a pipe, socket or device" in err
    assert len(err.splitlines()) == 1


def test_a_broken_registry_file_that_was_named_is_wrong_use(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("variants: [", encoding="utf-8")
    code, _, err = run("--registry", str(path), "list")
    assert code == 2
    assert f"{path}:2:1: not valid YAML" in err


def test_a_broken_registry_file_that_was_found_is_a_note(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attnlab.yaml").write_text("variants: [", encoding="utf-8")
    code, out, err = run("list")
    assert code == 0
    assert "dot_product" in out
    assert err.startswith("attnlab: note: ")
    assert "attnlab.yaml" in err


def test_version_names_the_package_and_the_interface(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out == "attnlab 0.1.0 (plugin interface 1)\n"


@pytest.mark.parametrize("command", ["list", "info", "check", "doctor", "trust", "compare"])
def test_help_of_every_command_has_examples(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"  attnlab {command}" in out.split("examples:")[1]


def test_help_lists_the_commands_and_says_the_exit_codes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for word in ("list", "info", "check", "compare", "doctor", "trust", "exit codes", "examples", "NO_COLOR"):
        assert word in out


def test_no_words_at_all_show_the_help_as_wrong_use(run: Run) -> None:
    code, out, _ = run()
    assert code == 2
    assert "usage: attnlab" in out


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvalidInput("five was expected, got six"), 2, "attnlab: five was expected, got six\n"),
        (KeyboardInterrupt(), 130, "attnlab: interrupted\n"),
        (SystemExit(1), 1, ""),
        (SystemExit("enough"), 2, "attnlab: enough\n"),
        (SystemExit(None), 0, ""),
        (FileNotFoundError(2, "No such file or directory", "x.bin"), 2, "attnlab: x.bin: No such file or directory\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_how_a_command_ends_is_its_exit_code(
    run: Run, offer: Offer, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(terminal, "abandon_output", lambda: None)
    offer(odd=raising(error))
    assert run("odd") == (code, "", said)


def test_a_fault_of_ours_says_where_to_report_it_without_a_traceback(run: Run, offer: Offer) -> None:
    offer(odd=raising(ZeroDivisionError("division by zero")))
    code, _, err = run("odd")
    assert code == 3
    assert "ZeroDivisionError: division by zero" in err
    assert "report" in err
    assert "Traceback" not in err


def test_the_debug_variable_shows_the_traceback(run: Run, offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLAB_DEBUG", "1")
    offer(odd=raising(ZeroDivisionError("division by zero")))
    code, _, err = run("odd")
    assert code == 3
    assert "Traceback" in err


@pytest.mark.parametrize(("returned", "code"), [(0, 0), (1, 1), (None, 0), (True, 1)])
def test_a_commands_number_is_the_exit_code(run: Run, offer: Offer, returned: Any, code: int) -> None:
    offer(odd=lambda args: returned)
    assert run("odd")[0] == code


def test_a_command_that_returns_no_number_is_refused(run: Run, offer: Offer) -> None:
    offer(odd=lambda args: "fine")
    code, _, err = run("odd")
    assert code == 2
    assert "'fine'" in err


def test_a_broken_hook_costs_nothing_but_its_commands(run: Run, offer: Offer) -> None:
    offer(hook=raising(RuntimeError("boom")))
    assert run("list")[0] == 0
    code, out, err = run("--help")
    assert code == 0
    assert "list" in out
    assert "stranger" in err
    assert "boom" in err
    code, _, err = run("odd")
    assert code == 2
    assert "no command is called 'odd'" in err


def test_a_plugin_cannot_take_the_place_of_a_core_command(run: Run, offer: Offer) -> None:
    offer(list=lambda args: 1)
    assert run("list")[0] == 0
    code, out, err = run("--help")
    assert code == 0
    assert "a stranger's command" not in out
    assert "attnlab's own is used" in err
