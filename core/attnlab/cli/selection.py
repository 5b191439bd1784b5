"""Which variants are meant by the names and patterns of a command line. Needs the standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from attnlab._quoting import quoted
from attnlab.errors import UnknownVariant, nearest

WILD = frozenset("*?[")


def is_pattern(name: str) -> bool:
    """Whether `name` holds a wildcard (`*`, `?`, `[...]`)."""
    return any(character in WILD for character in name)


def select(selection: Sequence[str], known: Sequence[str]) -> list[str]:
    """The known names that `selection` asks for, each once, in the order asked; all where nothing is asked.

    `UnknownVariant` with the nearest names for one that matches none.
    """
    if not selection:
        return list(known)
    chosen: dict[str, None] = {}
    for name in selection:
        results = [k for k in known if fnmatchcase(k, name)] if is_pattern(name) else [k for k in known if k == name]
        if not results:
            what = "no registered variant matches the pattern" if is_pattern(name) else "no variant is registered as"
            raise UnknownVariant(f"{what} {quoted(name)}; {nearest(name, known)}")
        chosen.update(dict.fromkeys(results))
    return list(chosen)
