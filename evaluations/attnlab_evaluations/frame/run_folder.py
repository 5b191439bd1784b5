"""A run's folder while it is in use: one process at a time, and what the run was asked to do, kept from the start.

Needs only the standard library. Every command that keeps records opens its folder here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from attnlab import InvalidInput
from attnlab_evaluations.frame import folders, records

LOCK = ".lock"
UNFINISHED = "finished"
"""A summary says `"finished": false` from the start of its run until the report replaces it."""
FREE = ("budget", "form", "check", "resume", "registry")
"""Settings that may change from one part of a run to the next: no cell depends on them."""


@contextmanager
def opened(out: Path, summary: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """The folder, made and locked, with its `settings` recorded in `summary`; both go where nothing came of it.

    Raises `InvalidInput` where another process uses the folder.
    """
    made = folders.make(out)
    try:
        with _locked(out):
            if choice(out, summary) is None:
                begun = {"schema": records.SCHEMA_VERSION, UNFINISHED: False, "settings": settings}
                with suppress(OSError):  # a disk that is full is told at the first record
                    records.write_text(out / summary, json.dumps(records.clean(begun), indent=1) + "\n")
            try:
                yield
            finally:
                if not folders.holds_run(out) and _unfinished(out / summary):
                    with suppress(OSError):
                        (out / summary).unlink()
    finally:
        folders.unmake(made)  # it stays where it holds a record


def choice(out: Path, summary: str) -> dict[str, Any] | None:
    """The settings that the run in the folder was begun with; None where there is no run, or it does not tell."""
    described = _read(out / summary)
    return None if described is None else described["settings"]


def was_begun(out: Path, summary: str) -> bool:
    """Whether the folder holds a run, be it one that ended before its first record or whose records were removed."""
    return folders.holds_run(out) or _read(out / summary) is not None


def refuse_replacing(out: Path, summary: str, names: Iterable[str]) -> None:
    """`InvalidInput` where the folder holds no run of ours but files of these names, which may be somebody's own."""
    if not was_begun(out, summary):
        folders.refuse_replacing(out, names)


def _unfinished(summary: Path) -> bool:
    described = _read(summary)
    return described is not None and described.get(UNFINISHED) is False


def _read(summary: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(result, dict) and "schema" in result and isinstance(result.get("settings"), dict)
    return result if ours else None


def take_over(args: Any, recorded: Mapping[str, Any] | None, words: Mapping[str, Callable[[Any], Any]]) -> None:
    """Fill the options of `args` that were not given (None, or no names) from what the run recorded.

    `words`: for each option, how its recorded settings read on the command line.
    """
    if recorded is None:
        return
    for option, written in words.items():
        if not getattr(args, option, None) and getattr(args, option, None) != 0:
            with suppress(KeyError, TypeError):
                setattr(args, option, written(recorded))


def described(out: Path, summary: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary says of its run's settings: those that it was begun with, never others in their place.

    Where this part of the run was asked for other ones (more time, say), they stand beside them as `resumed_with`.
    """
    first, now = choice(out, summary), records.clean(settings)
    if first is None or first == now:
        return {"settings": now}
    return {"settings": first, "resumed_with": now}


def begun_or_new(
    folder: str | None, command: str, now: datetime, summary: str, args: Any, words: Mapping[str, Callable[[Any], Any]]
) -> tuple[Path, dict[str, Any] | None]:
    """The folder of a command that resumes the run in `--out` by itself, and that run's settings or None.

    The options of `args` that were not given are filled from the run's record.
    """
    out = folders.to_go_on_in(folder, command, now)
    recorded = choice(out, summary)
    take_over(args, recorded, words)
    return out, recorded


def refuse_another(
    out: Path, recorded: Mapping[str, Any] | None, settings: Mapping[str, Any], flags: Mapping[str, str]
) -> None:
    """`InvalidInput` where the run in the folder was begun with other settings than `settings`; `flags` set them."""
    for name, begun, now in _differing(recorded or {}, records.clean(settings)):
        flag = flags.get(name, name)
        raise InvalidInput(
            f"--out: {out} holds a run that was begun with {flag} {_shown(begun)}, got {_shown(now)}; leave {flag} out "
            "to resume that run, or choose another --out for a new one"
        )


def _differing(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, begun in recorded.items():
        if name in FREE or name not in settings or settings[name] == begun:
            continue
        if isinstance(begun, Mapping) and isinstance(settings[name], Mapping):
            yield from _differing(begun, settings[name])
        else:
            yield name, begun, settings[name]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The system's own lock on a file in the folder: it ends with its process, however that ends."""
    path = out / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(handle):
            with suppress(OSError):
                os.close(handle)
            raise InvalidInput(
                f"--out: {out} is in use by another run{_holder(path)}; wait for it to end, or choose another folder"
            )
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        os.close(handle)  # its last holder took the file away between our two calls
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        if os.name == "nt":  # an open file cannot be taken away there
            os.close(handle)
            with suppress(OSError):
                path.unlink()
        else:
            with suppress(OSError):
                path.unlink()
            os.close(handle)


def _lock(handle: int) -> bool:
    """Whether the lock was free, and is ours now."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(handle, 1024, os.SEEK_SET)  # beyond the number, which others may read
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError):
        return f" (process {int(path.read_text(encoding='ascii'))})"
    return ""
