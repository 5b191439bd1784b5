"""README.md is short, opens with the two commands and shows results that are the generated ones.

Its blocks, command lines and links are tested with those of docs/, in test_docs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (ROOT / "evaluations" / "MODELS.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.no_torch


def table_of(text: str) -> dict[str, dict[str, str]]:
    """The cells of the first table of a page that begins with `| variant`, by variant and column."""
    start = text.index("| variant")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text[start:].split("\n\n")[0].splitlines()
    ]
    head, _, *body = rows
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def test_the_readme_opens_with_the_two_commands() -> None:
    top = README[:900]
    assert "make compare" in top
    assert "make test" in top


def test_the_readme_has_150_lines_at_most_and_python_by_line_25() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert lines.index("```python") < 25


def test_the_results_of_the_readme_are_cells_of_the_generated_table() -> None:
    generated = table_of(MODELS)
    for variant, cells in table_of(README).items():
        for model, cell in cells.items():
            assert generated[variant][model].split()[0] == cell, (variant, model)


def test_the_readme_counts_the_variants_and_architectures_of_the_generated_table() -> None:
    generated = table_of(MODELS)
    assert f"{len(generated)} variants and {len(generated['dot_product'])} architectures" in README
