"""A caller's value as a message repeats it: whole where it is short, cut where it is long.

Needs only the standard library; anything in attnlab may import it.
"""

from __future__ import annotations

import re
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
    except KeyboardInterrupt:
        raise
    except BaseException:
        # A stranger's __repr__ may raise anything, and Python's own does for an int of 4301 digits.
        return f"a value of type {type(value).__name__}"


def words_of(error: BaseException) -> str:
    """An exception's own words on one line; "" where it has none or its `__str__` raises.

    For exceptions of strangers. `KeyboardInterrupt` passes.
    """
    try:
        return " ".join(str(error).split())
    except KeyboardInterrupt:
        raise
    except BaseException:  # a stranger's __str__ may raise anything
        return ""


# What a terminal acts on, or what hides or reorders the text around it: controls but tab and line feed, bidirectional
# controls, line separators, invisible characters but the joiners that scripts need, tags.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """`text` with what a terminal would act on as an escape: `\\x1b`, `\\u202e`. Tabs and line feeds stay."""
    return _ACTING.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    point = ord(match[0])
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def abridged(message: str, values: Iterable[object], limit: int = LONGEST) -> str:
    """`message`, with each of `values` cut that it repeats and that is longer than `limit`.

    For messages that others wrote: a variant's about its options, argparse's about what was typed.
    """
    for value in values:
        try:
            shapes = {repr(value), str(value)}
        except KeyboardInterrupt:
            raise
        except BaseException:  # as in `quoted`; a message cannot repeat what cannot be written
            continue
        for text in sorted(shapes, key=len, reverse=True):
            if len(text) > limit and text in message:
                closing = text[-1] if text[0] in "'\"" and text[0] == text[-1] else ""
                message = message.replace(text, short(text, limit) + closing)
    return message
