"""A caller's value as a message repeats it: whole where it is short, cut where it is long.

Needs only the standard library; anything in attnlab may import it.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 60  # characters of one value that a message repeats


def short(text: str, limit: int = LONGEST) -> str:
    """`text`, cut to `limit` characters with three dots at the end where it is longer."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(value: object) -> str:
    """`repr(value)` on one line, cut as `short` does; a text is cut inside its quotes."""
    if isinstance(value, str):
        return repr(short(value))
    try:
        return short(" ".join(repr(value).split()))
    except Exception:
        # A stranger's __repr__ may raise anything, and Python's own does for an int of 4301 digits.
        return f"a value of type {type(value).__name__}"


def abridged(message: str, values: Iterable[object], limit: int = LONGEST) -> str:
    """`message`, with each of `values` cut that it repeats and that is longer than `limit`.

    For messages that others wrote: a variant's about its options, argparse's about what was typed.
    """
    for value in values:
        try:
            shapes = {repr(value), str(value)}
        except Exception:  # as in `quoted`; a message cannot repeat what cannot be written
            continue
        for text in sorted(shapes, key=len, reverse=True):
            if len(text) > limit and text in message:
                closing = text[-1] if text[0] in "'\"" and text[0] == text[-1] else ""
                message = message.replace(text, short(text, limit) + closing)
    return message
