"""What a run was asked to do, read from the command line and judged. Imports no torch."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest

REFERENCE = "dot_product"
RUNS = Path("attnlab-runs")
LENGTHS = (256, 512, 1024, 2048, 4096)
BUDGET = 220.0
EXAMPLES = """\
examples:
  attnlab compare                                         every variant that is not a preset, both workloads
  attnlab compare --variants 'linearised*' --workloads sweep
  attnlab compare --variants all --budget 1200            presets too, with more time for narrow intervals
  attnlab compare --lengths 1024,8192 --out my-run
  attnlab compare --out my-run --resume                   finish an interrupted run
  attnlab compare --targets                               the goals that attnlab has set itself, side by side

dot_product is always measured: it is the reference of every ratio. A run folder gets results.jsonl,
table.md, table.csv and provenance.json. Exit code 1: a variant failed its conformance checks."""


@dataclass(frozen=True)
class Settings:
    """A run, fully spelled out: names resolved, numbers checked."""

    variants: tuple[str, ...]
    workloads: tuple[str, ...]
    out: Path
    budget: float = BUDGET
    seed: int = 0
    threads: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    device: str = "cpu"
    form: str = "table"
    resume: bool = False

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        words = [
            "attnlab",
            "compare",
            "--out",
            str(self.out),
            "--resume",
            "--variants",
            ",".join(self.variants),
        ]
        words += ["--workloads", ",".join(self.workloads), "--seed", str(self.seed)]
        words += ["--lengths", ",".join(map(str, self.lengths)), "--budget", f"{self.budget:g}"]
        words += ["--threads", str(self.threads)] if self.threads else []
        words += ["--device", self.device] if self.device != "cpu" else []
        return shlex.join(words)


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--variants",
        metavar="A,B",
        help="names or patterns, or 'all'; default: every row that is not a preset",
    )
    add("--workloads", metavar="A,B", help="minilm, sweep, or a plugin's; default: all")
    add("--out", metavar="DIR", help=f"the run folder; default: {RUNS}/<time>")
    add(
        "--resume",
        action="store_true",
        help="go on in --out (default: the newest run); finished cells are kept",
    )
    add(
        "--budget",
        metavar="SECONDS",
        default=f"{BUDGET:g}",
        help="time for measuring, after the checks; default: %(default)s",
    )
    add("--seed", metavar="N", default="0", help="of inputs, parameters and orders; default: %(default)s")
    add("--threads", metavar="N", help="torch's threads; default: torch's choice, which is recorded")
    add(
        "--lengths",
        metavar="A,B",
        default=",".join(map(str, LENGTHS)),
        help="of the sweep; default: %(default)s",
    )
    add("--device", default="cpu", help="cpu or cuda; default: %(default)s")
    add(
        "--format",
        choices=("table", "json"),
        default="table",
        dest="form",
        help="on stdout; the files are always written",
    )
    add(
        "--targets",
        action="store_true",
        help="measure attnlab's own goals instead, and print goal and verdict",
    )


def settle(args: Namespace, known_workloads: Sequence[str], now: datetime | None = None) -> Settings:
    """`Settings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense."""
    workloads = _words("--workloads", args.workloads) if args.workloads is not None else list(known_workloads)
    for name in workloads:
        if name not in known_workloads:
            raise InvalidInput(
                f"--workloads: no workload is called {name!r}; {nearest(name, known_workloads)}"
            )
    resume = bool(args.resume)
    out = folder(args.out)
    if out is None:
        out = newest_run() if resume else RUNS / (now or datetime.now()).strftime("%Y-%m-%d-%H%M%S")
    if not resume and (out / "results.jsonl").exists():
        raise InvalidInput(
            f"--out: {out} already holds a run; add --resume to go on with it, or choose another folder"
        )
    if resume and not (out / "results.jsonl").exists():
        raise InvalidInput(
            f"--resume: {out} holds no run (no results.jsonl); leave --resume out to start one"
        )
    return Settings(
        variants=tuple(select(args.variants)),
        workloads=tuple(dict.fromkeys(workloads)),
        out=out,
        budget=number("--budget", args.budget, float, 1),
        seed=number("--seed", args.seed, int, 0, 2**32 - 1),
        threads=None if args.threads is None else number("--threads", args.threads, int, 1),
        lengths=tuple(
            sorted({number("--lengths", n, int, 1, 2**31 - 1) for n in _words("--lengths", args.lengths)})
        ),
        device=args.device,
        form=args.form,
        resume=resume,
    )


def folder(asked: str | None) -> Path | None:
    """The folder that `--out` names; `InvalidInput` where it cannot be one."""
    if asked is None:
        return None
    if not asked.strip():
        raise InvalidInput("--out: expected a folder, got an empty name; leave --out out for the default")
    out = Path(asked)
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out: expected a folder, got the file {out}; choose another name")
    return out


def select(asked: str | None) -> list[str]:
    """The variants that a comma-separated list of names and patterns means, the reference first."""
    known = attnlab.names()
    if asked is None:
        chosen = [n for n in known if attnlab.info(n).extends is None]
    else:
        chosen = []
        for word in _words("--variants", asked):
            found = [n for n in known if word == "all" or fnmatchcase(n, word)]
            if not found:
                raise UnknownVariant(f"--variants: no variant is called {word!r}; {nearest(word, known)}")
            chosen += found
    first = [REFERENCE] if REFERENCE in known else []
    return list(dict.fromkeys([*first, *chosen]))


def newest_run() -> Path:
    """The last run of the default folder, by name, which is its time."""
    runs = sorted(p.parent for p in RUNS.glob("*/results.jsonl"))
    if not runs:
        raise InvalidInput(
            f"--resume: there is no run in {RUNS}{os.sep} to go on with; give its folder with --out"
        )
    return runs[-1]


def number(option: str, text: str, kind: Any, least: int, most: int | None = None) -> Any:
    """`text` as an int or float of at least `least`, at most `most`; `InvalidInput` says what was expected."""
    what = "a whole number" if kind is int else "a number"
    try:
        value = kind(text)
    except ValueError:
        value = least - 1
    if not least <= value < float("inf"):
        raise InvalidInput(f"{option}: expected {what} of {least} or more, got {text!r}")
    if most is not None and value > most:
        raise InvalidInput(f"{option}: expected {what} of at most {most}, got {text!r}")
    return value


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidInput(f"{option}: expected names separated by commas, got {text!r}")
    return words
