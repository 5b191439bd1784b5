"""The command line: `attnlab`, or `python -m attnlab`. Needs no torch; commands import it where they compute.

Exit codes: 0 success; 1 a check or comparison failed; 2 wrong use; 3 a fault of attnlab itself; 130 and
141 as shells expect them for an interrupt and for a reader (`| head`) that has gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from attnlab._quoting import abridged, words_of
from attnlab.errors import AttnlabError

__all__ = ["main"]

SUCCESS, FAILED, WRONG_USE, OUR_FAULT, INTERRUPTED, READER_GONE = 0, 1, 2, 3, 130, 141
LONGEST_WORD = 300  # characters of a typed word that a message repeats; a path is often longer than a name


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Nothing that can be typed ends in a traceback.

    `argv` are the words after the program's name, by default the process's own. `ATTNLAB_DEBUG=1` shows the
    traceback of any error.
    """
    from attnlab.cli import terminal

    terminal.prepare()
    if argv is None:
        # Worker processes start by `-c`: the working directory runs nothing there either.
        os.environ["PYTHONSAFEPATH"] = "1"
    with terminal.escaping():
        return _run(list(sys.argv[1:] if argv is None else argv), in_process=argv is not None)


def _run(words: list[str], *, in_process: bool) -> int:
    """The exit code of a command line, with every error as a sentence on stderr."""
    from attnlab.cli import dispatch, terminal

    try:
        code = dispatch.run(words, in_process=in_process)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse's --help, or a plugin's command
        return _code_of(stop)
    except KeyboardInterrupt:
        terminal.say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        terminal.abandon_output()
        return READER_GONE
    except AttnlabError as problem:
        _traceback_if_asked()
        terminal.say(_abridged(words_of(problem), words))
        return WRONG_USE
    except ImportError as problem:
        _traceback_if_asked()
        terminal.say(f"{words_of(problem)}; this command needs what cannot be imported, see `attnlab doctor`")
        return WRONG_USE
    except OSError as problem:
        _traceback_if_asked()
        terminal.abandon_output()
        what = f"{problem.filename or 'reading or writing'}: {problem.strerror or words_of(problem)}"
        terminal.say(_abridged(what, words))
        return WRONG_USE
    except BaseException as problem:
        # The last resort: what nobody foresaw is told as a fault, never shown as a traceback.
        if _traceback_if_asked():
            return OUR_FAULT
        terminal.say(
            f"unexpected {type(problem).__name__}: {words_of(problem)}; this is a fault of attnlab or of a plugin: "
            "please report it with the output of `ATTNLAB_DEBUG=1 attnlab ...` and `attnlab doctor`"
        )
        return OUR_FAULT


def _abridged(message: str, words: Sequence[str]) -> str:
    """The message with what was typed cut short: whole words, and what follows `=` in them."""
    return abridged(message, (*words, *(word.partition("=")[2] for word in words)), LONGEST_WORD)


def _code_of(stop: SystemExit) -> int:
    """The exit code that Python itself would give for `stop`; a text is printed and counts as wrong use."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or SUCCESS
    from attnlab.cli import terminal

    terminal.say(words_of(stop))
    return WRONG_USE


def _traceback_if_asked() -> bool:
    """Print the current exception's traceback where `ATTNLAB_DEBUG` is set (and not 0); whether it was."""
    if os.environ.get("ATTNLAB_DEBUG", "") in ("", "0"):
        return False
    import traceback

    traceback.print_exc()
    return True
