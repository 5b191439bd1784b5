"""The house's style, as far as a machine can tell: sizes, docstrings, syntax, ruff, mypy --strict."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 450  # lines; the aim is 300
SOURCES = sorted(
    path
    for folder in ("core", "plugins", "evaluations", "tests", ".ci")
    for path in (ROOT / folder).rglob("*.py")
)
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("core", "plugins", "evaluations")]


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[path.relative_to(ROOT).as_posix() for path in paths])


def test_there_are_sources_to_look_at() -> None:
    assert len(SHIPPED) > 20


def test_no_file_is_far_longer_than_one_idea() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCES
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST}
    assert not too_long, f"split these, {LONGEST} lines is the most: {too_long}"


@named(SHIPPED)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path}: no module docstring"


@named(SHIPPED)
def test_a_module_parses_as_the_oldest_python(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


# Where strangers' files and code are met, so that much has to be caught; elsewhere a narrow except does.
OPEN_TO_STRANGERS = [
    path
    for path in SHIPPED
    if path.relative_to(ROOT / path.relative_to(ROOT).parts[0])
    .as_posix()
    .startswith(
        ("attnlab/registry/", "attnlab/cli/", "attnlab/hooks", "attnlab/_files", "attnlab/_entry_points")
    )
]


@named(OPEN_TO_STRANGERS)
def test_a_broad_except_says_in_a_comment_what_it_expects(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    words = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0] for token in words if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"all"}
            if caught & {"Exception", "BaseException", "all"}:
                assert comments & {node.lineno, node.lineno + 1}, f"{path}:{node.lineno}: say why it is broad"


def test_ruff_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_mypy_strict_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
