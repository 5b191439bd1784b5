"""Text within the terminal's width: tables fold by groups of columns, words are never broken (F27)."""

import pytest

from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.gpu.speed import BACKENDS
from attnlab_evaluations.tasks.gpu.tables import speed_table
from attnlab_evaluations.tasks.models import report
from attnlab_evaluations.tasks.models.outcome import Cell

pytestmark = pytest.mark.filterwarnings("default")
BODY = [[f"variant_{n}", "ok", "1.23 [1.2, 1.3]", "0.5x faster", "a reason of many words " * 4] for n in range(3)]
HEADERS = ["variant", "status", "forward ms", "ratio", "why"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_fits_and_loses_nothing(width):
    text = layout.table(HEADERS, BODY, groups=(0, 1, 1, 2), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for row in BODY for cell in row for word in cell.split())
    assert text.count("variant_0") == 1 + text.count("\n\n")  # each block begins with the key


def test_a_word_is_never_broken():
    word = "x" * 100
    assert layout.wrap(f"a {word} b", 40) == ["a", word, "b"]


@pytest.mark.parametrize("width", [60, 80])
def test_the_tables_of_other_commands_fit_too(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    cells = [
        Cell(m, v, "refused", f"{v}: {m} is refused for a long reason " * 3)
        for m in "abcdefghijklm"
        for v in ("x", "y")
    ]
    assert max(map(len, report.text(cells, "table").splitlines())) <= width
    speed = {
        "variant": "sliding_window", "status": "ok", "detail": "",
        "coordinates": {"length": 16384, "width": 128, "causal": True, "phase": "forward_backward"},
        "value": {
            "calls": {n: {"status": "unsupported", "reason": "no kernel for this shape " * 3} for n in BACKENDS},
            "ratio": {"best": "flash", "median": 1.0, "low": 0.9, "high": 1.1, "level": 0.75},
        },
    }  # fmt: skip
    text = speed_table([speed])
    assert max(map(len, text.splitlines())) <= width
    assert "at 75%" in " ".join(text.split())
