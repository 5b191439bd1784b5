"""README.md and docs/: Python blocks run, command lines are understood, and links and anchors lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from attnlab import catalogue
from attnlab.cli import dispatch, main

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]  # the tutorial's blocks run in test_tutorial.py
LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "plugins").glob("*.md")),
    *sorted((ROOT / "evaluations").glob("*.md")),
]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PENDING: set[str] = set()
SHELL = ("sh", "bash", "console")
SHELL_PROGRAMS = {"attnlab", "make", "python", "python3", ".venv/bin/python"}


class Block(NamedTuple):
    """A fenced block of a page: its language, its code and the line of its fence."""

    page: Path
    language: str
    code: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.stem}-line-{self.line}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[Block]:
    text = text_of(page)
    return [Block(page, m["language"], m["code"], text.count("\n", 0, m.start()) + 1) for m in BLOCK.finditer(text)]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
LINES = [
    (block, line.split(" #")[0].strip())
    for block in BLOCKS
    if block.language in SHELL
    for line in block.code.splitlines()
    if line and not line.startswith("#")
]
# One test for each different command, whichever page has it.
COMMANDS = sorted({line for _, line in LINES})
# A block whose first line is `# NAME` is the file of that name.
NAMED = [(m[1], block) for block in BLOCKS if (m := re.match(r"# ([\w.]+\.(?:py|yaml))\n", block.code))]
FILES = {name: block.code for name, block in NAMED}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A new working directory on Python's path, and a registry without additions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    catalogue.use_registry(None)
    yield tmp_path
    catalogue.use_registry(None)
    for name in {Path(file).stem for file in FILES} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.no_torch
def test_the_pages_have_blocks_and_each_file_is_written_once() -> None:
    assert len(PYTHON) >= 15
    assert len(NAMED) == len(FILES)
    assert set(FILES) == {"cosine.py", "attnlab.yaml"}


@pytest.mark.no_torch
@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_has_a_runnable_block_or_a_generated_table(page: Path) -> None:
    runnable = any(block.language in ("python", *SHELL) for block in blocks_of(page))
    assert runnable or "<!-- generated" in text_of(page)


@pytest.mark.no_torch
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language_that_is_tested_or_is_output(block: Block) -> None:
    assert block.language in ("python", "yaml", *SHELL, "", "text")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs_as_pasted_in_a_new_namespace(folder: Path, block: Block) -> None:
    (folder / "cosine.py").write_text(FILES["cosine.py"], encoding="utf-8")
    code = compile("\n" * block.line + block.code, str(block.page), "exec")
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
    assert len([command for command in COMMANDS if command.startswith("attnlab ")]) >= 20


@pytest.mark.no_torch
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_is_understood(command: str) -> None:
    program, *words = shlex.split(command)
    assert program in SHELL_PROGRAMS, f"no test understands {program!r}"
    if program == "make":
        assert re.search(rf"^{re.escape(words[0])}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return
    if program != "attnlab":
        assert words[0] == "-m"
        if words[1] != "attnlab":
            assert words[1] in ("venv", "pip", "pytest")
            return
        words = words[2:]
    before, after = dispatch.split(words)
    assert before == [] or before[0] == "--registry"
    dispatch.parse(after)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = BLOCK.sub("", text_of(page))
    heads = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


LINKS = sorted(
    {
        (page.relative_to(ROOT).as_posix(), link)
        for page in LINKED
        for link in LINK.findall(BLOCK.sub("", text_of(page)))
    }
)


@pytest.mark.no_torch
@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda part: str(part))
def test_a_link_leads_to_a_file_and_a_heading_or_has_the_form_of_an_address(page: str, link: str) -> None:
    if "://" in link:
        assert re.fullmatch(r"https://[\w.-]+\.\w+(/[^\s]*)?", link)
        return
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    if not target.exists() and target.relative_to(ROOT).as_posix() in PENDING:
        return
    assert target.exists(), f"{page}: no file {link}"
    assert target.resolve().is_relative_to(ROOT), f"{page}: {link} leaves the repository"
    if anchor:
        assert anchor in anchors_of(target), f"{page}: no heading {link}"


@pytest.mark.no_torch
def test_the_index_links_every_page() -> None:
    linked = {link.split("#")[0] for link in LINK.findall(text_of(ROOT / "docs" / "index.md"))}
    assert {page.name for page in DOCS} - {"index.md"} <= linked
