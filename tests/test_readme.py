"""The README's Python blocks run as they stand, each by itself; its command lines are ones that exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab import catalogue
from attnlab.cli import dispatch, main

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
PYTHON = [block for block in BLOCK.finditer(README) if block["language"] == "python"]
# A block whose first line is `# NAME` is the file of that name.
FILES = {
    found[1]: block["code"]
    for block in BLOCK.finditer(README)
    if (found := re.match(r"# ([\w.]+\.(?:py|yaml))\n", block["code"]))
}


def line_of(block: re.Match[str]) -> int:
    return README.count("\n", 0, block.start()) + 1


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A working directory of one's own that is on Python's path, and a registry that nobody added to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    catalogue.use_registry(None)
    yield tmp_path
    catalogue.use_registry(None)
    for name in {Path(file).stem for file in FILES} & (set(sys.modules) - before):
        del sys.modules[name]


def test_there_are_python_blocks_and_files_to_try() -> None:
    assert len(PYTHON) >= 6
    assert set(FILES) == {"cosine.py", "attnlab.yaml"}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line-{line_of(block)}")
def test_a_python_block_runs_as_pasted_in_a_new_namespace(folder: Path, block: re.Match[str]) -> None:
    (folder / "cosine.py").write_text(FILES["cosine.py"], encoding="utf-8")
    code = compile("\n" * line_of(block) + block["code"], str(ROOT / "README.md"), "exec")
    exec(code, {"__name__": "__main__"})


def test_the_files_make_a_variant_that_is_found_trusted_and_right(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert main(["list", "cosine*"]) == 0
    assert "attnlab trust" in capsys.readouterr().out
    assert main(["trust", "attnlab.yaml"]) == 0
    catalogue.use_registry(None)
    assert main(["check", "cosine*", "--quick", "--only", "values"]) == 0
    assert "2 right" in capsys.readouterr().out


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
