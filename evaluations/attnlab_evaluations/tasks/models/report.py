"""The matrix as text: one row a variant, one column a model, reasons numbered below. Needs tabulate."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from tabulate import tabulate

from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.models.outcome import EQUAL, FORWARD, REFUSED, WORKS, WRONG, Cell

LEGEND = (
    f"{EQUAL}: logits, gradients and generated tokens are those of the model's own attention; {WORKS}: in its own way, padding-, batch- "
    f"and causality-proof; {FORWARD}: as that, without generating; {REFUSED}: for the reason of that number; {WRONG}: it is"
)
TITLE = "# Variants in models of Hugging Face transformers"


def text(cells: Sequence[Cell], form: str) -> str:
    """The whole report in `form`: table, markdown or json."""
    if form == "json":
        return json.dumps([asdict(cell) for cell in cells], indent=1)
    models, variants = _ordered(c.model for c in cells), _ordered(c.variant for c in cells)
    reasons = _ordered(reason(cell) for cell in cells if cell.note)
    at = {(cell.model, cell.variant): cell for cell in cells}

    def word(cell: Cell | None) -> str:
        if cell is None:  # an interrupted run
            return "not run"
        return f"{cell.status} {reasons.index(reason(cell)) + 1}" if cell.note else cell.status

    rows = [[variant, *(word(at.get((model, variant))) for model in models)] for variant in variants]
    headers = ["variant", *models]
    table = tabulate(rows, headers=headers, tablefmt="github") if form == "markdown" else layout.table(headers, rows)
    notes = [f"{number}. {words}" for number, words in enumerate(reasons, 1)]
    errors = [cell.error for cell in cells if cell.status == EQUAL and cell.error is not None]
    parts = [LEGEND, *notes]
    if errors:
        parts.append(f"largest relative difference of logits where {EQUAL}: {max(errors):.1e}")
    if any(cell.packed is not None for cell in cells):
        parts.append(_packing(cells))
    if form == "markdown":
        intro = "Written by `attnlab models --format markdown --write FILE`: tiny models with random weights."
        return "\n\n".join((TITLE, intro, table, LEGEND, "\n".join(notes), *parts[1 + len(notes) :]))
    return "\n".join((table, "", layout.paragraphs(parts)))


def _packing(cells: Sequence[Cell]) -> str:
    """Who takes packed sequences, over the models in which anything was asked."""
    features = [cell for cell in cells if cell.packed is not None]
    refusing = {cell.variant for cell in features if not cell.packed}
    taken = [variant for variant in _ordered(c.variant for c in features) if variant not in refusing]
    return (
        f"sequences packed in one row, told apart by position ids that start anew ({', '.join(_ordered(c.model for c in features))}), are each "
        f"answered as if alone by {', '.join(taken) or 'none'}; the rest refuses them"
    )


def reason(cell: Cell) -> str:
    """The note without what differs between variants and models: their names, numbers of keys, and who else could serve."""
    note = re.split(r"\. (?:No other registered|Variants of the formula)", cell.note)[0]
    note = re.sub(r"\d+ queries and \d+ keys", "Lq queries and Lk keys", note.replace(cell.variant, "it"))
    note = re.sub(r"input of \d+ tokens, but \d+ keys", "input, but more keys", note)
    return re.sub(r"^it:? ", "", note)


def _ordered(words: object) -> list[str]:
    return list(dict.fromkeys(words))  # type: ignore[call-overload]
