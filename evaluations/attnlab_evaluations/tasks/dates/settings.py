"""The settings of `attnlab dates`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest
from attnlab_evaluations.frame import folders, run_folder
from attnlab_evaluations.tasks.compare.settings import MOST_THREADS, number, or_default
from attnlab_evaluations.tasks.dates.recipe import Recipe

NONE = "none"
"""The row without attention; it is part of every run, as the trivial level."""
DEFAULT = ("additive", "multiplicative")
SUMMARY = "dates.json"
BUDGET = 600.0
SEEDS, EXAMPLES_TESTED, THREADS = 3, 500, 2
MOST_SEEDS, MOST_STEPS, MOST_EXAMPLES, MOST_BEAM, MOST_POWER = 1000, 10**6, 10**6, 1000, 10
LEAST_STEPS = 2
"""What torch's one-cycle schedule needs."""
EXAMPLES = f"""\
examples:
  attnlab dates                                      additive, multiplicative and none, 3 seeds each
  attnlab dates --check                              the same; exit code 1 where a goal is missed
  attnlab dates dot_product 'linearised*' --seeds 1
  attnlab dates additive --cell lstm --no-input-feeding
  attnlab dates --beam 4 --length-power 1            also by beam search, ordered by mean log probability
  attnlab dates --out my-run                         again with the same folder: finished trainings are kept

Each variant is the attention of the same recurrent encoder-decoder, trained on the same examples for the same
number of steps: dates in words, in 12 languages' long and full formats, to YYYY-MM-DD, character by character.
The date sits in filler of 0 to 30 characters a side in training, 60 to 80 in the test. A date counts where
every character is right. {NONE!r}, no attention at all, is always part of a run: it is the trivial level.

The folder gets results.jsonl, {SUMMARY} and, for each variant and seed, a heat map of the alignment
(needs matplotlib: pip install 'attnlab[plots]'). The formats need Babel: pip install 'attnlab[dates]'.
Goals of --check: {" and ".join(DEFAULT)} at least 95 %, {NONE} at most 30 %, for every seed."""


RECORDED: dict[str, Callable[[Any], Any]] = {
    "names": lambda kept: list(kept["variants"]),
    "seeds": lambda kept: str(kept["seeds"]),
    "steps": lambda kept: str(kept["recipe"]["steps"]),
    "budget": lambda kept: f"{kept['budget']:g}",
    "examples": lambda kept: str(kept["examples"]),
    "beam": lambda kept: str(kept["beam"]),
    "length_power": lambda kept: f"{kept['length_power']:g}" if kept["length_power"] else None,
    "cell": lambda kept: kept["recipe"]["cell"],
    "no_input_feeding": lambda kept: not kept["recipe"]["input_feeding"],
    "threads": lambda kept: str(kept["threads"]),
    "device": lambda kept: kept["device"],
}
"""How a run's recorded settings read on the command line, by option."""
FLAGS = {
    **{name: f"--{name.replace('_', '-')}" for name in RECORDED},
    "variants": "the variants",
    "input_feeding": "--no-input-feeding: input feeding",
}


@dataclass(frozen=True)
class DatesSettings:
    """A run, fully spelled out: names resolved, numbers checked."""

    variants: tuple[str, ...]
    out: Path
    seeds: int = SEEDS
    recipe: Recipe = field(default_factory=Recipe)
    examples: int = EXAMPLES_TESTED
    beam: int = 1
    length_power: float = 0.0
    budget: float = BUDGET
    threads: int = THREADS
    device: str = "cpu"
    check: bool = False
    form: str = "table"
    registry: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """What the summary keeps: no folder or file names, which may hold a person's."""
        kept = {k: v for k, v in vars(self).items() if k not in ("out", "registry", "recipe")}
        return {**kept, "recipe": asdict(self.recipe)}

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        out = str(self.out)
        out = os.path.join(os.curdir, out) if out.startswith("-") else out
        words = ["attnlab", "dates", *self.variants, "--out", out, "--seeds", str(self.seeds)]
        words += ["--steps", str(self.recipe.steps), "--budget", f"{self.budget:g}"]
        words += ["--examples", str(self.examples), "--threads", str(self.threads)]
        words += ["--cell", self.recipe.cell] if self.recipe.cell != Recipe().cell else []
        words += [] if self.recipe.input_feeding else ["--no-input-feeding"]
        words += ["--beam", str(self.beam)] if self.beam != 1 else []
        words += ["--length-power", f"{self.length_power:g}"] if self.length_power else []
        words += ["--device", self.device] if self.device != "cpu" else []
        words += ["--check"] if self.check else []
        words += ["--format", self.form] if self.form != "table" else []
        words += [word for file in self.registry for word in ("--registry", file)]
        return shlex.join(words)


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "names",
        metavar="NAME",
        nargs="*",
        help=f"variants, by name or pattern; default: {' '.join(DEFAULT)}; {NONE} always joins them",
    )
    add("--seeds", metavar="N", help=f"trainings of each variant; default: {SEEDS}")
    add("--steps", metavar="N", help=f"of every training; default: {Recipe().steps}")
    add("--budget", metavar="SECONDS", help=f"a training that takes longer is ended and says so; default: {BUDGET:g}")
    add(
        "--out",
        metavar="DIR",
        help=f"the run folder; one that holds a run is resumed, as it was begun; default: {folders.RUNS}/dates/<time>",
    )
    add("--examples", metavar="N", help=f"dates in the test; default: {EXAMPLES_TESTED}")
    add("--beam", metavar="N", help="of a beam search beside greedy decoding; default: none")
    add(
        "--length-power",
        metavar="P",
        help="order the beam by log probability over length to this power; default: 0, by log probability",
    )
    add("--cell", choices=("gru", "lstm"), help=f"default: {Recipe().cell}")
    add(
        "--no-input-feeding",
        action="store_true",
        default=None,
        help="each step sees the symbol before it, not where attention was",
    )
    add("--threads", metavar="N", help=f"torch's threads; default: {THREADS}")
    add("--device", help="cpu, cuda or cuda:1; default: cpu")
    add("--check", action="store_true", help="exit code 1 where a goal is missed")
    add("--format", choices=("table", "json"), default="table", dest="form", help="on stdout")


def settle(args: Namespace, now: datetime | None = None) -> DatesSettings:
    """`DatesSettings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense."""
    out, recorded = run_folder.begun_or_new(args.out, "dates", now or datetime.now(), SUMMARY, args, RECORDED)
    device = "cpu" if args.device is None else args.device
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InvalidInput(f"--device: expected cpu, cuda or cuda:1, got {device!r}; leave --device out for cpu")
    beam = number("--beam", args.beam or "1", int, 1, MOST_BEAM)
    if args.length_power is not None and beam == 1:
        raise InvalidInput(
            f"--length-power: expected a beam of 2 or more to order, got --beam {beam}; "
            "give --beam or leave --length-power out"
        )
    settings = DatesSettings(
        variants=_variants(args.names),
        out=out,
        seeds=number("--seeds", or_default(args.seeds, SEEDS), int, 1, MOST_SEEDS),
        recipe=Recipe(
            steps=number("--steps", or_default(args.steps, Recipe().steps), int, LEAST_STEPS, MOST_STEPS),
            cell=args.cell or Recipe().cell,
            input_feeding=not args.no_input_feeding,
        ),
        examples=number("--examples", or_default(args.examples, EXAMPLES_TESTED), int, 1, MOST_EXAMPLES),
        beam=beam,
        length_power=number("--length-power", or_default(args.length_power, 0), float, 0, MOST_POWER),
        budget=number("--budget", or_default(args.budget, f"{BUDGET:g}"), float, 1),
        threads=number("--threads", or_default(args.threads, THREADS), int, 1, MOST_THREADS),
        device=device,
        check=bool(args.check),
        form=args.form,
        registry=tuple(getattr(args, "registry", None) or ()),
    )
    run_folder.refuse_another(out, recorded, settings.recorded(), FLAGS)
    pictures = (heat_map_name(v, s) for v in settings.variants for s in range(settings.seeds))
    run_folder.refuse_replacing(out, SUMMARY, [SUMMARY, *pictures])
    return settings


def heat_map_name(variant: str, seed: int) -> str:
    """The file of one heat map."""
    return f"alignment-{variant}-seed{seed}.png"


def _variants(names: list[str]) -> tuple[str, ...]:
    known = attnlab.names()
    chosen: list[str] = []
    for word in names or DEFAULT:
        results = [n for n in (*known, NONE) if fnmatchcase(n, word)]
        if not results:
            raise UnknownVariant(f"dates: no variant is called {word!r}; {nearest(word, (*known, NONE))}")
        chosen += results
    return tuple(dict.fromkeys([NONE, *chosen]))
