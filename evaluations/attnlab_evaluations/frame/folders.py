"""The run folder: validated before any work, made late, removed if it stays empty. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from attnlab import InvalidInput

RUNS = Path("attnlab-runs")
RESULTS = "results.jsonl"


def asked_for(text: str) -> Path:
    """The folder that `--out` names; `InvalidInput` where it cannot be made or written to. Makes nothing.

    A leading `~/` is the user's own folder also where the shell left it alone, as in `--out=~/run`.
    """
    if not text.strip():
        raise InvalidInput("--out: expected a folder, got an empty name; leave --out out for the default")
    out = Path(os.path.expanduser(text) if text == "~" or text.startswith("~/") else text)
    try:
        standing = out  # itself, or the nearest folder above it that exists
        while not os.path.lexists(standing) and standing != standing.parent:
            standing = standing.parent
        is_folder = standing.is_dir()
        out.is_dir()  # raises for a name that is too long
        if not out.is_absolute():
            os.getcwd()  # raises where the folder that we are in was taken away
    except (OSError, ValueError) as error:
        raise _unusable(out, error) from None
    if not is_folder:
        what = f"the file {out}" if standing == out else f"{out}, and {standing} is a file"
        raise InvalidInput(f"--out: expected a folder, got {what}; choose another name")
    if not os.access(standing, os.W_OK | os.X_OK):
        what = f"write to {out}" if standing == out else f"make {out} in {standing}"
        raise InvalidInput(f"--out: no permission to {what}; choose another folder")
    return out


def fresh(now: datetime, under: Path = RUNS) -> Path:
    """A folder in `under` that is called after the time and does not exist yet."""
    name = now.strftime("%Y-%m-%d-%H%M%S")
    out, n = under / name, 1
    while os.path.lexists(out):
        n += 1
        out = under / f"{name}-{n}"
    return out


def to_go_on_in(folder: str | None, command: str, now: datetime) -> Path:
    """The folder of a command whose run is resumed where the folder holds one: what `--out` names, else a fresh one.

    Raises as `asked_for`. Makes nothing.
    """
    return asked_for(str(fresh(now, RUNS / command)) if folder is None else folder)


def newest_run(summary: str) -> Path:
    """The last run in `RUNS`, by name, which is its time; one that has only its `summary` yet counts."""
    runs = sorted({p.parent for name in (RESULTS, summary) for p in RUNS.glob(f"*/{name}")})
    if not runs:
        raise InvalidInput(f"--resume: there is no run in {RUNS}{os.sep} to go on with; give its folder with --out")
    return runs[-1]


def holds_run(out: Path) -> bool:
    """Whether the folder holds a run's records."""
    return os.path.lexists(out / RESULTS)


def refuse_replacing(out: Path, names: Iterable[str]) -> None:
    """`InvalidInput` where the folder holds files of these names, which may be somebody's own."""
    results = [name for name in names if os.path.lexists(out / name)]
    if results:
        raise InvalidInput(
            f"--out: {out} holds {' and '.join(results)}, which would be replaced; choose another folder"
        )


def make(out: Path) -> list[Path]:
    """Make the folder and those above it; what was made, innermost first, for `unmake`.

    Raises `InvalidInput`, and leaves nothing, where that fails.
    """
    missing = []
    for folder in (out, *out.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        unmake(missing)
        raise _unusable(out, error) from None
    return missing


def unmake(made: Iterable[Path]) -> None:
    """Take away the folders of `make` that are still empty."""
    for folder in made:
        try:
            folder.rmdir()
        except (OSError, ValueError):
            return


def _unusable(out: Path, error: Exception) -> InvalidInput:
    reason = getattr(error, "strerror", None) or error
    shown = str(out) if len(str(out)) <= 120 else f"{str(out)[:120]}..."
    return InvalidInput(f"--out: cannot make the folder {shown}: {reason}; choose another")
