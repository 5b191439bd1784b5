"""Text for a terminal of a given width: tables that fold into blocks, paragraphs that wrap. Needs tabulate; no torch.

No line is longer than the terminal is wide, unless a single word is.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

GAP = 2
"""Spaces between two columns."""
HEADER_PAD = 2
"""What tabulate adds to a header."""
LEAST_WIDTH = 40
LEAST_COLUMN = 10


def terminal_width() -> int:
    """The columns of the terminal; 80 where there is none, and 40 at least."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)


def table(
    headers: Sequence[str],
    body: Sequence[Sequence[Any]],
    *,
    keys: int = 1,
    groups: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """The table in one block where it fits, else in blocks of columns below each other, each with the first `keys` columns.

    `groups` gives for each further column the number of its group: a group stays together where it fits. Where not even
    one column fits beside the keys, cells wrap.
    """
    room = terminal_width() if width is None else width
    cells = [[str(cell) for cell in row] for row in body]
    widths = [
        max([_longest(head) + HEADER_PAD, *(_longest(row[n]) for row in cells)]) for n, head in enumerate(headers)
    ]
    blocks = _blocks(widths, keys, groups or list(range(len(headers) - keys)), room)
    return "\n\n".join(_drawn(headers, cells, [*range(keys), *block], widths, room) for block in blocks)


def _blocks(widths: Sequence[int], keys: int, groups: Sequence[int], room: int) -> list[list[int]]:
    """The columns of each block. Groups that fit share a block; one that does not is split."""
    fixed = sum(widths[:keys]) + GAP * (keys - 1)
    columns: dict[int, list[int]] = {}
    for column, group in enumerate(groups, start=keys):
        columns.setdefault(group, []).append(column)
    parts: list[list[int]] = []
    for members in columns.values():
        whole = fixed + sum(widths[n] + GAP for n in members) <= room
        parts += [members] if whole else [[n] for n in members]
    blocks: list[list[int]] = []
    for part in parts:
        together = [*blocks[-1], *part] if blocks else part
        if blocks and fixed + sum(widths[n] + GAP for n in together) <= room:
            blocks[-1] = together
        else:
            blocks.append(list(part))
    return blocks or [[]]


def _drawn(
    headers: Sequence[str], cells: Sequence[Sequence[str]], columns: list[int], widths: Sequence[int], room: int
) -> str:
    allowed = _narrowed([widths[n] for n in columns], room)
    return tabulate(
        [[_wrapped(row[n], at) for n, at in zip(columns, allowed, strict=True)] for row in cells],
        headers=[_wrapped(headers[n], at - HEADER_PAD) for n, at in zip(columns, allowed, strict=True)],
        tablefmt="simple",
        disable_numparse=True,
    )


def _narrowed(widths: list[int], room: int) -> list[int]:
    """Widths that fit: the widest column gives first."""
    results = list(widths)
    while results and sum(results) + GAP * (len(results) - 1) > room and max(results) > LEAST_COLUMN:
        results[results.index(max(results))] -= 1
    return results


def _wrapped(text: str, width: int) -> str:
    lines = (part for line in text.splitlines() for part in wrap(line, width))
    return "\n".join(lines)


def _longest(text: str) -> int:
    return max((len(line) for line in text.splitlines()), default=0)


def wrap(line: str, width: int | None = None, *, indent: str = "") -> list[str]:
    """A line in pieces that fit, broken at spaces only."""
    room = terminal_width() if width is None else width
    if len(line) <= room:
        return [line]
    return textwrap.wrap(line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [line]


def paragraphs(lines: Iterable[str], width: int | None = None) -> str:
    """Each line, wrapped; what continues one is indented."""
    return "\n".join(part for text in lines for line in text.split("\n") for part in wrap(line, width, indent="  "))
