"""A row into a registry file that somebody wrote: as text, so that comments, order and line ends stay. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from attnlab.errors import InvalidInput, RegistryFileError
from attnlab.registry.rows import read_rows
from attnlab.registry.yaml_reader import Mapping, Node, Scalar, Sequence, parse
from attnlab.scaffolding.filling import registry_file


class CannotAdd(InvalidInput):
    """The file is right, but no place for a row was found that leaves everything else as it is."""


def with_row(data: bytes, path: Path, row: str) -> str:
    """The text of the registry file `data` with `row` as its last; as it is where that row is there already.

    Only lines are added, at the end of `variants:`. The result is read again, and must hold what the file
    held and the row. Raises `RegistryFileError` where the file is none, `CannotAdd` where the result is not that.
    """
    root = parse(data, path)
    read_rows(root, path)
    text = data.decode("utf-8")  # a byte-order mark stays, as a character
    old, own = _bare(root), _rows_of(_bare(parse(registry_file(row).encode("utf-8"), path)))
    if own[0] in _rows_of(old):
        return text
    candidate = _with_lines(text, root, row)
    try:
        if candidate is not None and _bare(parse(candidate.encode("utf-8"), path)) == _extended(old, own):
            return candidate
    except RegistryFileError:
        pass  # the lines did not fit in; nothing was written
    raise CannotAdd(f"new: no row can be added to {path} as it is written")


def _bare(node: Node) -> Any:
    """A node without places: pairs for a mapping, so that order and double keys count."""
    if isinstance(node, Mapping):
        return tuple((_bare(key), _bare(value)) for key, value in node.items)
    if isinstance(node, Sequence):
        return [_bare(item) for item in node.items]
    return (type(node.value).__name__, node.value, node.ambiguous)


_VARIANTS = _bare(Scalar("variants", 0, 0))


def _rows_of(root: Any) -> Any:
    return next(value for key, value in root if key == _VARIANTS)


def _extended(root: Any, own: Any) -> Any:
    """The bare file `root` with the rows `own` after its others."""
    return tuple((key, (*value, *own) if key == _VARIANTS else value) for key, value in root)


def _with_lines(text: str, root: Node, row: str) -> str | None:
    """The text with the row's lines put in; None where `variants:` is written in a way that has no lines."""
    assert isinstance(root, Mapping)
    lines = text.splitlines(keepends=True)
    end = "\r\n" if "\r\n" in text else "\n"
    key, rows = next((key, node) for key, node in root.items if key.value == "variants")
    assert isinstance(rows, Mapping)
    after = [other.line - 1 for other, _ in root.items if other.line > key.line]
    stop = min(after, default=len(lines))
    if rows.items:
        first, margin = rows.items[0][0].line - 1, rows.items[0][0].column - 1
    else:
        first, margin = key.line, 2
        opened = re.fullmatch(r"(\ufeff?variants:)\s*\{\s*\}(.*)", lines[key.line - 1], re.DOTALL)
        if opened is None:
            return None
        lines[key.line - 1] = f"{opened[1]}{opened[2]}"
    # Blank lines, and comments that belong to the key below, stay below.
    while stop > first and (not lines[stop - 1].strip() or (after and lines[stop - 1].startswith("#"))):
        stop -= 1
    apart = any(not line.strip() for line in lines[first:stop])
    if stop and not lines[stop - 1].endswith(("\n", "\r")):
        lines[stop - 1] += end
    added = indent(row, " " * margin).replace("\n", end)
    lines[stop:stop] = [end + added if apart else added]
    return "".join(lines)
