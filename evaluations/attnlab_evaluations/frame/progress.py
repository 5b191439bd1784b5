"""One line of progress on stderr, for people only. Needs only the standard library.

Nothing is written where stderr is not a terminal. No colour is used, so NO_COLOR needs no case.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """A line that replaces itself: `[ 12 s] sweep: length 1024, causal: forward`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        # The command line's stderr shows a carriage return as an escape; the stream behind it moves the line.
        self.stream: TextIO = getattr(sys.stderr, "raw", sys.stderr) if stream is None else stream
        self._clock = clock
        self._began = clock()
        self._width = 0
        self.shown = bool(getattr(self.stream, "isatty", lambda: False)())

    def say(self, text: str) -> None:
        """Show `text` instead of the line before."""
        if not self.shown:
            return
        room = max(1, shutil.get_terminal_size().columns - 1)  # a wrapped line could not replace itself
        line = f"[{self._clock() - self._began:4.0f} s] {text}"[:room]
        line = "".join(c if c.isprintable() else "?" for c in line)  # a plugin's names too
        encoding = getattr(self.stream, "encoding", None) or "ascii"
        line = line.encode(encoding, "replace").decode(encoding)
        self.stream.write("\r" + line + " " * max(0, self._width - len(line)))
        self.stream.flush()
        self._width = len(line)

    def done(self) -> None:
        """Take the line away, so that what follows starts on a clean one."""
        if self.shown and self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width = 0
