"""plugins/TUTORIAL.md, done as it says, in a folder of its own: every command, file, edit and shown output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from attnlab.cli import dispatch

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "plugins" / "TUTORIAL.md"
TEXT = TUTORIAL.read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
HEAD = {"python": re.compile(r"# (\S+\.py)\n"), "diff": re.compile(r"--- (\S+)\n")}


class Step(NamedTuple):
    """A block of the tutorial: its language, its text and its line."""

    language: str
    body: str
    line: int


STEPS = [
    Step(found["language"], found["body"], TEXT.count("\n", 0, found.start()) + 1) for found in BLOCK.finditer(TEXT)
]
COMMANDS = [(line, step.line) for step in STEPS if step.language == "sh" for line in step.body.splitlines() if line]


def is_installing(command: str) -> bool:
    """The one command that is not run here: tests/packaging installs."""
    return command.startswith("python -m pip install")


def takes_long(command: str) -> bool:
    """Commands of more than a few seconds: all checks, as a report or as pytest items, and measurements."""
    words = command.split()
    return words[0] == "pytest" or (
        words[0] == "attnlab" and words[1] in ("check", "compare") and "--only" not in words
    )


class Reader:
    """Somebody who does what the tutorial says; `all_of_it` with what takes long."""

    def __init__(self, folder: Path, all_of_it: bool) -> None:
        self.folder, self.all_of_it = folder, all_of_it
        self.output: str | None = None  # of the commands above; None where they were left out

    def do(self, step: Step) -> None:
        getattr(self, f"_{step.language}")(step)

    def _sh(self, step: Step) -> None:
        commands = step.body.splitlines()
        self.output = None
        if any(is_installing(command) for command in commands):
            return
        if not self.all_of_it and any(takes_long(command) for command in commands):
            return
        self.output = "".join(self._run(command) for command in commands)

    def _run(self, command: str) -> str:
        program, *words = shlex.split(command)
        if program == "mkdir":
            (self.folder / words[0]).mkdir()
            return ""
        if program == "cd":
            self.folder /= words[0]
            return ""
        start = {"attnlab": ["-m", "attnlab"], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"], "python": []}
        path = os.pathsep.join(str(ROOT / folder) for folder in ("core", "plugins", "evaluations"))
        done = subprocess.run(
            [sys.executable, *start[program], *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def _text(self, step: Step) -> None:
        """Every line shown is a line of the output, in order; `...` stands for anything."""
        if self.output is None:
            return
        lines = iter(self.output.splitlines())
        for wanted in step.body.splitlines():
            pattern = ".*".join(re.escape(part) for part in wanted.rstrip().split("..."))
            assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), (
                f"{TUTORIAL.name}:{step.line}: no (further) line {wanted!r} in\n{self.output}"
            )

    def _python(self, step: Step) -> None:
        name = self._file(step)
        (self.folder / name).write_text(step.body, encoding="utf-8")

    def _diff(self, step: Step) -> None:
        path = self.folder / self._file(step)
        before, after = "", ""
        for line in step.body.splitlines(keepends=True)[1:]:
            before += line[1:] if line[0] in "- " else ""
            after += line[1:] if line[0] in "+ " else ""
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{TUTORIAL.name}:{step.line}: {path.name} has no one place like\n{before}"
        path.write_text(text.replace(before, after), encoding="utf-8")

    def _file(self, step: Step) -> str:
        found = HEAD[step.language].match(step.body)
        assert found is not None, f"{TUTORIAL.name}:{step.line}: the block does not say which file it is"
        return found[1]


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path, all_of_it=False)
    for step in STEPS:
        reader.do(step)


@pytest.mark.full
def test_the_whole_tutorial_does_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path, all_of_it=True)
    for step in STEPS:
        reader.do(step)


@pytest.mark.no_torch
def test_the_tutorial_has_steps_of_every_kind() -> None:
    count = {kind: sum(step.language == kind for step in STEPS) for kind in ("sh", "text", "python", "diff")}
    assert sum(count.values()) == len(STEPS), "a block of another language is not tested"
    assert all(number >= 2 for number in count.values()), count
    assert sum(is_installing(command) for command, _ in COMMANDS) == 1
    assert sum("failed" in step.body for step in STEPS if step.language == "text") == 1, "the one mistake"


@pytest.mark.no_torch
@pytest.mark.parametrize("command", [c for c, _ in COMMANDS if c.startswith("attnlab ")])
def test_a_command_of_the_tutorial_is_understood(command: str) -> None:
    before, after = dispatch.split(shlex.split(command)[1:])
    assert before == []
    dispatch.parse(after)


@pytest.mark.no_torch
@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http|#)([^)]+)\)", TEXT))))
def test_a_link_of_the_tutorial_leads_somewhere(path: str) -> None:
    assert (TUTORIAL.parent / path.split("#")[0]).exists()
