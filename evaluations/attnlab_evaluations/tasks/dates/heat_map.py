"""An alignment as a heat map with the characters on its axes, as PNG. Needs matplotlib, imported when used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab import VariantUnavailable

END, SPACE = "end", "␣"
CELL, ROW = 0.125, 0.18  # inches of a character's column and of a row
LEFT, RIGHT, TOP, TITLE, BETWEEN = 0.6, 0.9, 0.35, 0.25, 0.8  # inches around an alignment


def missing() -> str | None:
    """One sentence that says what to install, or None where matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return "heat maps need matplotlib, which is not installed; pip install 'attnlab[plots]'"
    return None


def labels(alignment: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """`(source, target)`: a visible label for each column and each row of the weights."""
    source = [SPACE if letter.isspace() else letter for letter in alignment["source"]]
    return source, [*alignment["written"], *([END] if alignment["ended"] else [])]


def save(path: Path, title: str, alignments: Sequence[Mapping[str, Any]]) -> None:
    """Draw alignments one under the other and put them at `path` in one step.

    An alignment is what `training.alignment` gives: source, written, ended, target, locale, weights `[T][L]`. Rows are the
    characters written, columns those of the source; the date's lie between two lines. Raises `VariantUnavailable` without
    matplotlib.
    """
    sentence = missing()
    if sentence is not None:
        raise VariantUnavailable(sentence)
    from matplotlib.figure import Figure

    widest = max(len(a["source"]) for a in alignments)
    tall = [ROW * len(a["weights"]) for a in alignments]
    width, height = CELL * widest + LEFT + RIGHT, sum(tall) + BETWEEN * len(tall) + TOP
    figure = Figure(figsize=(width, height), dpi=100)  # placed by hand: a layout engine takes seconds
    figure.text(0.5, 1 - 0.15 / height, title, ha="center", va="top", fontsize=11)
    below = height - TOP
    for result, size in zip(alignments, tall, strict=True):
        below -= size + TITLE
        span = CELL * len(result["source"])
        axes = figure.add_axes((LEFT / width, below / height, span / width, size / height))
        bar = figure.add_axes(((LEFT + span + 0.15) / width, below / height, 0.12 / width, size / height))
        _draw(axes, bar, result)
        below -= BETWEEN - TITLE
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw(axes: Any, bar: Any, result: Mapping[str, Any]) -> None:
    columns, written = labels(result)
    image = axes.imshow(result["weights"], aspect="auto", cmap="viridis", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(written)), written, fontsize=8)
    for edge in (result["start"], result["stop"]):
        axes.axvline(edge - 0.5, color="white", linewidth=0.8)
    right = "right" if result["written"] == result["target"] else f"wrong, it is {result['target']}"
    date = result["source"][result["start"] : result["stop"]]
    axes.set_title(f"{result['locale']}: {date} → {result['written']} ({right})", fontsize=9)
    axes.set_xlabel("source, character by character", fontsize=8)
    axes.set_ylabel("written", fontsize=8)
    bar.figure.colorbar(image, cax=bar, label="weight")
    bar.tick_params(labelsize=7)
