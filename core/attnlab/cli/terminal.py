"""What the command line knows about the terminal: encodings, colour, width, progress."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from attnlab._quoting import printable, short

COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}
PATIENCE = 2.0  # seconds before a progress line appears
LONGEST_LINE = 8000  # characters of one line on stderr
_PARTS = re.compile(
    "(\x0e[0-9]{1,2}\x0f)"
)  # what `paint` puts around a text: a colour's number between shift-out and -in
_PAINT = re.compile("\x0e([0-9]{1,2})\x0f")


class Escaping:
    """A text stream that shows what a terminal would act on as an escape, but for what `paint` makes.

    Every text on its way to a person passes it: a registry file's, a plugin's, an exception's. `raw` is the stream behind.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(_PAINT.sub("\033[\\1m", _escaped(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def escaping() -> Iterator[None]:
    """While the body runs, `sys.stdout` and `sys.stderr` are `Escaping`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (s if isinstance(s, Escaping) else Escaping(s) for s in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """The stream behind an `Escaping`, for lines that are rewritten in place."""
    return stream.raw if isinstance(stream, Escaping) else stream


def prepare() -> None:
    """Let stdout and stderr show what their encoding lacks as an escape, and a closed one take everything."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, or a program without a console
            # Open for as long as the process lives.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def shown(text: str, stream: TextIO | None = None) -> str:
    """`text` as `stream` (default stdout) will show it, so that widths are those of the screen."""
    text = _escaped(text)
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text


def _escaped(text: str) -> str:
    """`printable`, with the marks of `paint` as they are."""
    return "".join(part if _PAINT.fullmatch(part) else printable(part) for part in _PARTS.split(text))


def speaks_unicode(stream: TextIO | None = None) -> bool:
    """Whether every character can be written to `stream` (default stdout) as it is."""
    return (getattr(stream or sys.stdout, "encoding", None) or "").lower().replace("-", "").startswith("utf")


def say(message: str) -> None:
    """One `attnlab: message` line on stderr, at most `LONGEST_LINE` characters; silent where even that is closed."""
    line = short(" ".join(message.split()), LONGEST_LINE)
    with suppress(OSError, ValueError):
        print(f"attnlab: {line}", file=sys.stderr, flush=True)


def abandon_output() -> None:
    """Point stdout at nothing, so that Python's last flush does not complain about the gone reader."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO) -> bool:
    """Whether a person is looking at `stream`."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def paint(text: str, colour: str) -> str:
    """`text` between marks that `Escaping` makes a colour of, where stdout is a terminal that shows colour and `NO_COLOR` is unset or empty."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(sys.stdout):
        return text
    return f"\x0e{COLOURS[colour]}\x0f{text}\x0e0\x0f"


def width() -> int | None:
    """Columns of the terminal behind stdout, or None where stdout is no terminal (nothing is cut then)."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


class Line:
    """The text of a progress line, which the work may change as it goes."""

    def __init__(self, text: str) -> None:
        self.text = text


@contextmanager
def progress(text: str) -> Iterator[Line]:
    """While the body runs longer than two seconds: a text and the seconds on stderr, on a terminal only."""
    line = Line(text)
    if not is_terminal(sys.stderr):
        yield line
        return
    done = threading.Event()
    started = time.monotonic()

    def tick() -> None:
        wait = PATIENCE
        while not done.wait(wait):
            raw(sys.stderr).write(f"\r\033[K{printable(line.text)} ... {time.monotonic() - started:.0f} s ")
            sys.stderr.flush()
            wait = 1.0

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield line
    finally:
        done.set()
        ticker.join()
        if time.monotonic() - started > PATIENCE:
            raw(sys.stderr).write("\r\033[K")
            sys.stderr.flush()
