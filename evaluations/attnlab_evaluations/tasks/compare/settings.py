"""The settings of `attnlab compare`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

import os
import shlex
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest
from attnlab_evaluations.frame import folders, run_folder

REFERENCE = "dot_product"
LENGTHS = (256, 512, 1024, 2048, 4096)
BUDGET = 220.0
MOST_SEED = 2**32 - 1
MOST_LENGTH = 2**31 - 1
MOST_THREADS = 1024
"""OpenMP ends the process where the system grants no more threads, and nobody can catch that."""
PROVENANCE = "provenance.json"
WRITTEN = ("table.md", "table.csv", PROVENANCE)
"""What a run puts beside its records."""
TARGETS_WRITTEN = ("targets.json", "targets.md")
TARGETS_IGNORE = ("variants", "workloads", "resume", "lengths", "device")
"""The options that say nothing about attnlab's own goals."""
EXAMPLES = """\
examples:
  attnlab compare                                         every variant that is not a preset, both workloads
  attnlab compare --variants 'linearised*' --workloads sweep
  attnlab compare --variants all --budget 1200            presets too, with more time for narrow intervals
  attnlab compare --lengths 1024,8192 --out my-run
  attnlab compare --out my-run --resume                   finish an interrupted run
  attnlab compare --targets                               the goals that attnlab has set itself, side by side

dot_product is always measured: it is the reference of every ratio. A run folder gets results.jsonl,
table.md, table.csv and provenance.json. Exit code 1: a variant failed its conformance checks, or is wrong on the measured inputs."""


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
    registry: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """What provenance keeps: no folder or file names, which may hold a person's."""
        return {k: v for k, v in vars(self).items() if k not in ("out", "registry")}

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        out = str(self.out)
        out = os.path.join(os.curdir, out) if out.startswith("-") else out  # else it reads as an option
        words = ["attnlab", "compare", "--out", out, "--resume", "--variants", ",".join(self.variants)]
        words += ["--workloads", ",".join(self.workloads), "--seed", str(self.seed)]
        words += ["--lengths", ",".join(map(str, self.lengths)), "--budget", f"{self.budget:g}"]
        words += ["--threads", str(self.threads)] if self.threads else []
        words += ["--device", self.device] if self.device != "cpu" else []
        words += ["--format", self.form] if self.form != "table" else []
        words += [word for file in self.registry for word in ("--registry", file)]
        return shlex.join(words)


RECORDED: dict[str, Callable[[Any], Any]] = {
    "variants": lambda kept: ",".join(kept["variants"]),
    "workloads": lambda kept: ",".join(kept["workloads"]),
    "lengths": lambda kept: _joined(kept["lengths"]),
    "budget": lambda kept: f"{kept['budget']:g}",
    "seed": lambda kept: str(kept["seed"]),
    "threads": lambda kept: None if kept["threads"] is None else str(kept["threads"]),
    "device": lambda kept: kept["device"],
}
"""How a run's recorded settings read on the command line, by option."""
FLAGS = {name: f"--{name}" for name in RECORDED}


@dataclass(frozen=True)
class TargetSettings:
    """What `--targets` was asked to do, with everything checked."""

    budget: float = BUDGET
    seed: int = 0
    threads: int | None = None
    out: Path | None = None
    form: str = "table"


class _Words(Action):
    """Words that commas or spaces separate, kept as one text with commas."""

    def __call__(self, parser: ArgumentParser, args: Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(args, self.dest, ",".join(values))


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    words: dict[str, Any] = {"action": _Words, "nargs": "+", "metavar": ("A", "B")}
    add("--variants", **words, help="names or patterns, or 'all'; default: every row that is not a preset")
    add("--workloads", **words, help="minilm, sweep, or a plugin's; default: all")
    add("--out", metavar="DIR", help=f"the run folder; default: {folders.RUNS}/<time>")
    add(
        "--resume",
        action="store_true",
        help="finish the run in --out (default: the newest) as it was begun; finished cells are kept",
    )
    add("--budget", metavar="SECONDS", help=f"time for measuring, after the checks; default: {BUDGET:g}")
    add("--seed", metavar="N", help="of inputs, parameters and orders; default: 0")
    add("--threads", metavar="N", help="torch's threads; default: torch's choice, which is recorded")
    add("--lengths", **words, help=f"of the sweep; default: {_joined(LENGTHS)}")
    add("--device", help="cpu or cuda; default: cpu")
    add(
        "--format",
        choices=("table", "json"),
        default="table",
        dest="form",
        help="on stdout; the files are always written",
    )
    add("--targets", action="store_true", help="measure attnlab's own goals instead, and print goal and verdict")


def settle(args: Namespace, known_workloads: Sequence[str], now: datetime | None = None) -> Settings:
    """`Settings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense.

    A run that is resumed takes what is not given from its own record, and refuses what contradicts it.
    """
    resume = bool(args.resume)
    out = _folder(args.out, resume, now or datetime.now())
    if resume:
        recorded = run_folder.choice(out, PROVENANCE)
        if recorded is None and os.path.lexists(out / PROVENANCE) and not (args.variants and args.lengths):
            raise InvalidInput(
                f"--resume: {out / PROVENANCE} does not tell what the run was asked for; give its --variants, --workloads "
                "and --lengths, or begin another run"
            )
        run_folder.take_over(args, recorded, RECORDED)
    lengths = _words("--lengths", or_default(args.lengths, _joined(LENGTHS)))
    settings = Settings(
        variants=tuple(select(args.variants)),
        workloads=_workloads(args.workloads, known_workloads),
        out=out,
        budget=number("--budget", or_default(args.budget, f"{BUDGET:g}"), float, 1),
        seed=number("--seed", or_default(args.seed, "0"), int, 0, MOST_SEED),
        threads=_threads(args.threads),
        lengths=tuple(sorted({number("--lengths", n, int, 1, MOST_LENGTH) for n in lengths})),
        device=or_default(args.device, "cpu"),
        form=args.form,
        resume=resume,
        registry=tuple(getattr(args, "registry", None) or ()),
    )
    if resume:
        run_folder.refuse_another(out, recorded, settings.recorded(), FLAGS)
    return settings


def _folder(folder: str | None, resume: bool, now: datetime) -> Path:
    """The run folder, validated: one that holds a run is resumed, and only with --resume."""
    if folder is not None:
        out = folders.asked_for(folder)
    else:
        out = folders.asked_for(str(folders.newest_run(PROVENANCE) if resume else folders.fresh(now)))
    begun = run_folder.was_begun(out, PROVENANCE)
    if not resume and begun:
        before = "" if folders.holds_run(out) else ", which has no results"
        raise InvalidInput(
            f"--out: {out} already holds a run{before}; add --resume to go on with it, or choose another folder"
        )
    if resume and not begun:
        raise InvalidInput(f"--resume: {out} holds no run (no {folders.RESULTS}); leave --resume out to start one")
    if not resume:
        folders.refuse_replacing(out, WRITTEN)
    return out


def _workloads(names: str | None, known: Sequence[str]) -> tuple[str, ...]:
    chosen = _words("--workloads", names) if names is not None else list(known)
    for name in chosen:
        if name not in known:
            raise InvalidInput(f"--workloads: no workload is called {name!r}; {nearest(name, known)}")
    return tuple(dict.fromkeys(chosen))


def settle_targets(args: Namespace) -> TargetSettings:
    """`TargetSettings` from parsed arguments; `InvalidInput` also for options that would be ignored."""
    unset = {"lengths": (None, _joined(LENGTHS)), "device": (None, "cpu"), "resume": (False,)}
    useless = [f"--{w}" for w in TARGETS_IGNORE if getattr(args, w) not in unset.get(w, (None,))]
    if useless:
        has, them = ("has", "it") if len(useless) == 1 else ("have", "them")
        raise InvalidInput(f"--targets: {' and '.join(useless)} {has} no use with it; leave {them} out")
    out = None if args.out is None else folders.asked_for(args.out)
    if out is not None:
        folders.refuse_replacing(out, TARGETS_WRITTEN)
    return TargetSettings(
        budget=number("--budget", or_default(args.budget, f"{BUDGET:g}"), float, 1),
        seed=number("--seed", or_default(args.seed, "0"), int, 0, MOST_SEED),
        threads=_threads(args.threads),
        out=out,
        form=args.form,
    )


def select(names: str | None) -> list[str]:
    """The variants that a comma-separated list of names and patterns means, the reference first."""
    known = attnlab.names()
    if names is None:
        chosen = [n for n in known if attnlab.info(n).extends is None]
    else:
        chosen = []
        for word in _words("--variants", names):
            results = [n for n in known if word == "all" or fnmatchcase(n, word)]
            if not results:
                raise UnknownVariant(f"--variants: no variant is called {word!r}; {nearest(word, known)}")
            chosen += results
    first = [REFERENCE] if REFERENCE in known else []
    return list(dict.fromkeys([*first, *chosen]))


def number(option: str, text: str, kind: Any, least: int, most: int | None = None) -> Any:
    """`text` as an int or float of at least `least`, at most `most`; `InvalidInput` says what was expected."""
    what = "a whole number" if kind is int else "a number"
    try:
        value = kind(text)
    except ValueError:
        value = least - 1
    got = repr(text if len(text) <= 40 else f"{text[:40]}...")
    if not least <= value < float("inf"):
        raise InvalidInput(f"{option}: expected {what} of {least} or more, got {got}")
    if most is not None and value > most:
        raise InvalidInput(f"{option}: expected {what} of at most {most}, got {got}")
    return value


def or_default(text: Any, default: Any) -> Any:
    """What was typed, or the default's text where nothing was."""
    return str(default) if text is None else text


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _threads(text: str | None) -> int | None:
    return None if text is None else number("--threads", text, int, 1, MOST_THREADS)


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidInput(f"{option}: expected names separated by commas, got {text!r}")
    return words
