"""Records as a table, JSON, CSV or Markdown, aligned by what a terminal shows. Standard library only.

Own alignment, because wide characters (Japanese, say) take two columns and tabulate counts them as one
unless a further package is installed.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from attnlab._quoting import printable

FORMATS = ("table", "json", "csv", "markdown")
GAP = "  "
ELLIPSIS = "..."


def render(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], form: str, empty: str = "nothing to show") -> str:
    """The rows in one of `FORMATS`, without a final newline. JSON holds rows whole, the others `columns`."""
    if form == "json":
        return as_json(rows)
    cells = [[cell(row.get(column)) for column in columns] for row in rows]
    if form == "csv":
        return as_csv(columns, cells)
    if form == "markdown":
        return as_markdown(columns, cells)
    return as_table(columns, cells) if rows else empty


def cell(value: Any) -> str:
    """A value as one line of text: yes/-, ?, comma lists."""
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={'null' if v is None else v}" for key, v in value.items()) or "-"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(str(v) for v in value) or "-"
    return " ".join(str(value).split())


def as_json(value: Any) -> str:
    """JSON, indented; characters that the terminal lacks are escaped the JSON way."""
    import json

    from attnlab.cli.terminal import speaks_unicode

    text = json.dumps(value, indent=2, ensure_ascii=not speaks_unicode(), default=str)
    # What a terminal would act on is escaped as JSON has it, so that programs read the text as it was.
    return "".join(c if printable(c) == c else json.dumps(c)[1:-1] for c in text) if printable(text) != text else text


def as_csv(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """RFC 4180 with line feeds; always a header."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(cells)
    return out.getvalue().rstrip("\n")


def as_markdown(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A GitHub table; bars inside cells are escaped."""
    safe = [[text.replace("|", "\\|") for text in row] for row in cells]
    widths = _widths(columns, safe)
    lines = [_row(columns, widths, " | "), " | ".join("-" * w for w in widths)]
    lines += [_row(row, widths, " | ") for row in safe]
    return "\n".join(f"| {line} |" for line in lines)


def as_table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Columns of equal width under their names."""
    from attnlab.cli.terminal import shown

    plain = [[shown(text) for text in row] for row in cells]
    widths = _widths(columns, plain)
    lines = [_row(columns, widths, GAP), GAP.join("-" * w for w in widths)]
    lines += [_row(row, widths, GAP) for row in plain]
    return "\n".join(line.rstrip() for line in lines)


def display_width(text: str) -> int:
    """Terminal columns that `text` takes: 2 for wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(_width_of(character) for character in text)


def _width_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, limit: int) -> str:
    """`text`, cut to `limit` columns with three dots where it is wider."""
    if display_width(text) <= limit:
        return text
    kept, used = "", 0
    for character in text:
        used += _width_of(character)
        if used > max(limit - len(ELLIPSIS), 0):
            break
        kept += character
    return kept.rstrip() + ELLIPSIS


def table_width(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Columns that `as_table` would take."""
    return sum(_widths(columns, cells)) + len(GAP) * (len(columns) - 1)


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(display_width(row[i]) for row in (columns, *cells)) for i in range(len(columns))]


def _row(row: Sequence[str], widths: Sequence[int], gap: str) -> str:
    return gap.join(text + " " * (width - display_width(text)) for text, width in zip(row, widths, strict=True))
