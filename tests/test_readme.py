"""The README's Python blocks run, in order, in one namespace; its command lines are ones that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from attnlab.cli import dispatch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = sorted(
    {
        line.split(" #")[0].strip()
        for block in BLOCK.finditer(README)
        if block["language"] in ("sh", "bash", "console")
        for line in block["code"].splitlines()
        if line.startswith("attnlab ")
    }
)


def test_the_python_blocks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCK.finditer(README) if block["language"] == "python"]
    assert len(blocks) >= 4
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = README.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block["code"], str(ROOT / "README.md"), "exec"), namespace)


@pytest.mark.no_torch
def test_there_are_command_lines_to_try() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.no_torch
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_of_the_readme_is_understood(command: str) -> None:
    before, after = dispatch.split(shlex.split(command)[1:])
    assert before == [] or before[0] == "--registry"
    dispatch.parse(after)


@pytest.mark.no_torch
def test_the_readme_opens_with_the_two_commands() -> None:
    top = README[:900]
    assert "make compare" in top
    assert "make test" in top


@pytest.mark.no_torch
@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http|#)([^)]+)\)", README))))
def test_a_link_of_the_readme_leads_somewhere(path: str) -> None:
    assert (ROOT / path.split("#")[0]).exists()
