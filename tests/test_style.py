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
LONGEST = 80  # lines of a function, which then fits a screen
LONGER = {  # with the reason of each
    **dict.fromkeys(
        [
            "core/attnlab/engines/recurrence_kernels.py:backward_kernel",
            "core/attnlab/engines/recurrence_kernels.py:forward_kernel",
            "plugins/attnlab_plugins/flash/kernels/bias_gradient.py:bias_gradient_kernel",
            "plugins/attnlab_plugins/flash/kernels/forward.py:forward_kernel",
            "plugins/attnlab_plugins/flash/kernels/key_gradient.py:key_gradient_kernel",
            "plugins/attnlab_plugins/flash/kernels/query_gradient.py:query_gradient_kernel",
        ],
        "a Triton kernel: its arguments are one a line, and helpers cannot hold its accumulators",
    )
}
SOURCES = sorted(
    path for folder in ("core", "plugins", "evaluations", "tests", ".ci") for path in (ROOT / folder).rglob("*.py")
)
SHIPPED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("core", "plugins", "evaluations")]


def named(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[path.relative_to(ROOT).as_posix() for path in paths])


def test_there_are_sources_to_look_at() -> None:
    assert len(SHIPPED) > 20


def test_a_function_fits_a_screen() -> None:
    too_long = {}
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines, name = (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT).as_posix()}:{node.name}")
                if lines > LONGEST:
                    too_long[name] = lines
    assert {name: lines for name, lines in too_long.items() if name not in LONGER} == {}, (
        "cut these, or list them with a reason"
    )
    assert set(LONGER) == set(too_long), "listed and no longer too long"


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
    .startswith(("attnlab/registry/", "attnlab/cli/", "attnlab/hooks", "attnlab/_files", "attnlab/_entry_points"))
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
