"""The settings of `attnlab capacity`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import attnlab
from attnlab_evaluations.frame import folders, run_folder
from attnlab_evaluations.frame.chosen import Chosen, choose
from attnlab_evaluations.tasks.capacity.recipe import Recipe
from attnlab_evaluations.tasks.compare.settings import MOST_THREADS, number, or_default

SETTINGS = {"capacity": (8, 16, 32, 48), "overwrite": (8, 12, 16)}
"""The settings of the task, with the numbers of keys that each is tried at."""
SUMMARY = "capacity.json"
SEEDS, THREADS = 3, 1
LEAST_KEYS, MOST_KEYS, MOST_WIDTH, MOST_SEEDS, MOST_STEPS = 2, 4096, 4096, 1000, 10**6
EXAMPLES = f"""\
examples:
  attnlab capacity                                   softmax, linearised by several maps, the delta rule; 8 to 48 keys
  attnlab capacity --setting overwrite --keys 12     keys come back with other values: the last one counts
  attnlab capacity linearised linearised:feature_map=exp 'multiplicative*' --keys 16
  attnlab capacity dot_product --keys 20 40 60 --width 64 --max-steps 20000
  attnlab capacity --out my-run                      again with the same folder: finished trainings are kept

A sequence binds keys to values, at random; then the memory is asked each key. With N keys and N values, setting `capacity` has
every key and every value once; `overwrite` has 2 N pairs drawn with replacement. The memory is one head of a variant, with keys
and queries of --width: key W_k [v; k], query W_q k, value one-hot (Schlag et al. 2021, section 6.1). Every variant of a seed starts
from the same W_k and W_q and gets the same sequences; training ends at a loss of {Recipe().solved:g}, after {Recipe().patience} evaluations (one each
{Recipe().every} steps) without progress, or at --max-steps. Answering nothing has loss 0.5, guessing accuracy 1/N.

Options of a variant are given as NAME:option=value,option=value. The folder gets results.jsonl and {SUMMARY}."""


RECORDED: dict[str, Callable[[Any], Any]] = {
    "names": lambda kept: list(kept["variants"]),
    "setting": lambda kept: kept["setting"],
    "keys": lambda kept: [str(count) for count in kept["keys"]],
    "width": lambda kept: str(kept["recipe"]["width"]),
    "seeds": lambda kept: str(kept["seeds"]),
    "max_steps": lambda kept: str(kept["recipe"]["max_steps"]),
    "threads": lambda kept: str(kept["threads"]),
}
"""How a run's recorded settings read on the command line, by option."""
FLAGS = {**{name: f"--{name.replace('_', '-')}" for name in RECORDED}, "variants": "the variants"}


@dataclass(frozen=True)
class CapacitySettings:
    """A run, fully spelled out: names resolved, numbers checked."""

    variants: tuple[Chosen, ...]
    out: Path
    keys: tuple[int, ...] = SETTINGS["capacity"]
    setting: str = "capacity"
    seeds: int = SEEDS
    recipe: Recipe = field(default_factory=Recipe)
    threads: int = THREADS
    form: str = "table"
    registry: tuple[str, ...] = ()

    def recorded(self) -> dict[str, Any]:
        """What the summary keeps: no folder or file names, which may hold a person's."""
        left_out = ("out", "registry", "recipe", "variants")
        kept = {k: v for k, v in vars(self).items() if k not in left_out}
        return {"variants": [v.label for v in self.variants], **kept, "recipe": asdict(self.recipe)}

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        out = str(self.out)
        out = os.path.join(os.curdir, out) if out.startswith("-") else out
        words = ["attnlab", "capacity", *(v.label for v in self.variants), "--out", out]
        words += ["--setting", self.setting] if self.setting != "capacity" else []
        words += ["--keys", *map(str, self.keys), "--width", str(self.recipe.width), "--seeds", str(self.seeds)]
        words += ["--max-steps", str(self.recipe.max_steps), "--threads", str(self.threads)]
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
        help="variants in front of all options: a name or pattern, or NAME:option=value,option=value; "
        f"default: {' '.join(default_words())}",
    )
    each = "; ".join(f"{setting}: {' '.join(map(str, keys))}" for setting, keys in SETTINGS.items())
    add("--setting", choices=tuple(SETTINGS), help="default: capacity")
    add("--keys", metavar="N", nargs="+", help=f"numbers of keys, and of values; default: {each}")
    add(
        "--width", metavar="D", help=f"of keys and queries; default: {Recipe().width}; 64 shows what was published, too"
    )
    add("--seeds", metavar="N", help=f"trainings of each cell; default: {SEEDS}")
    add("--max-steps", metavar="N", help=f"of a training; default: {Recipe().max_steps}")
    add(
        "--out",
        metavar="DIR",
        help=f"the run folder; one that holds a run is resumed, as it was begun; default: {folders.RUNS}/capacity/<time>",
    )
    add("--threads", metavar="N", help=f"torch's threads; default: {THREADS}")
    add("--format", choices=("table", "json"), default="table", dest="form", help="on stdout")


def settle(args: Namespace, now: datetime | None = None) -> CapacitySettings:
    """`CapacitySettings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense."""
    out, recorded = run_folder.begun_or_new(args.out, "capacity", now or datetime.now(), SUMMARY, args, RECORDED)
    keys = [number("--keys", word, int, LEAST_KEYS, MOST_KEYS) for word in args.keys or ()]
    setting = args.setting or "capacity"
    settings = CapacitySettings(
        variants=choose("capacity", args.names or default_words()),
        out=out,
        keys=tuple(sorted(set(keys))) or SETTINGS[setting],
        setting=setting,
        seeds=number("--seeds", or_default(args.seeds, SEEDS), int, 1, MOST_SEEDS),
        recipe=Recipe(
            width=number("--width", or_default(args.width, Recipe().width), int, 1, MOST_WIDTH),
            max_steps=number("--max-steps", or_default(args.max_steps, Recipe().max_steps), int, 1, MOST_STEPS),
        ),
        threads=number("--threads", or_default(args.threads, THREADS), int, 1, MOST_THREADS),
        form=args.form,
        registry=tuple(getattr(args, "registry", None) or ()),
    )
    run_folder.refuse_another(out, recorded, settings.recorded(), FLAGS)
    run_folder.refuse_replacing(out, SUMMARY, [SUMMARY])
    return settings


def default_words() -> list[str]:
    """The paper's memories, as far as they are registered: softmax, the linear ones by their feature maps, the delta rule."""
    known = attnlab.names()
    words: list[str] = [name for name in ("dot_product", "linearised", "delta_rule") if name in known]
    if "linearised" in known and "nu" in attnlab.info("linearised").options:
        words += [f"linearised:feature_map=dpfp,nu={nu}" for nu in (1, 2, 3)]
    favor = (n for n in known if n == "favor" or attnlab.info(n).options.get("feature_map") == "favor")
    return [*words, *list(favor)[:1]]
