"""The settings of `attnlab minilm`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

import os
import re
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from attnlab import InvalidInput
from attnlab_evaluations.frame import folders, run_folder
from attnlab_evaluations.frame.chosen import Chosen, choose
from attnlab_evaluations.tasks.compare.settings import MOST_THREADS, number, or_default
from attnlab_evaluations.tasks.minilm.recipe import Recipe

SUMMARY = "minilm.json"
STUDENT = "linearised_hedgehog"
"""What `--distil` teaches where it names nothing."""
EXACT = 1e-5
"""The most by which an exact softmax variant may move any entry of an embedding."""
COSINE = 0.95
"""The least mean cosine that `--check` asks of a distilled model, for every seed."""
BUDGET = 120.0
SEEDS, SENTENCES, THREADS = 3, 128, 2
LEAST_SENTENCES, MOST_SENTENCES, MOST_SEEDS, MOST_STEPS = 3, 10**4, 1000, 10**6
EXAMPLES = f"""\
examples:
  attnlab minilm                                     every variant in all layers: how far the embeddings move
  attnlab minilm --check                             the same; exit code 1 where an exact variant moves them
  attnlab minilm 'linearised*' sliding_window:left=8,right=8
  attnlab minilm --distil                            teach {STUDENT} what the softmax does, 3 seeds
  attnlab minilm --distil linearised_taylor --seeds 1 --steps 20 40
  attnlab minilm --distil --save --out my-run        keep the models; again: finished trainings are kept

The model is all-MiniLM-L6-v2 with its own weights, the sentences come from Python's help topics. Its own embeddings, mean pooled
and of norm 1, are what every variant is held against: largest difference, mean cosine, sentences whose nearest other sentence is
the same, rank correlation of all pairs' cosines. What a variant learns is untrained, except with --distil.

--distil teaches a copy of the model with the variant in it, on sentences from the docstrings of Python's standard library: first
each layer's attention weights on the model's own states, then the states and embeddings of the whole (Zhang et al. 2024). Only
the variant's own parameters and the attention's projections learn. What declares no weights learns by the second stage alone:
--steps 0 200. --save writes each student to the run folder; attnlab.integrations.transformers.load reads it.

Needs pip install 'attnlab[transformers]'. Goals of --check: exact softmax variants within {EXACT:g}; with --distil, a mean
cosine of at least {COSINE:g} for every seed. The folder gets results.jsonl and {SUMMARY}."""


RECORDED: dict[str, Callable[[Any], Any]] = {
    "names": lambda kept: [] if kept["distil"] else list(kept["variants"]),
    "distil": lambda kept: kept["variants"][0] if kept["distil"] else None,
    "seeds": lambda kept: str(kept["seeds"]),
    "steps": lambda kept: [str(kept["recipe"][f"{stage}_steps"]) for stage in ("weight", "state")],
    "budget": lambda kept: f"{kept['budget']:g}",
    "sentences": lambda kept: str(kept["sentences"]),
    "save": lambda kept: kept["save"],
    "threads": lambda kept: str(kept["threads"]),
}
"""How a run's recorded settings read on the command line, by option."""
FLAGS = {
    **{name: f"--{name}" for name in RECORDED},
    "variants": "the variants",
    **{f"{stage}_steps": "--steps" for stage in ("weight", "state")},
}


@dataclass(frozen=True)
class MiniLMSettings:
    """A run, fully spelled out: names resolved, numbers checked. With `distil`, `variants` is the one that is taught."""

    variants: tuple[Chosen, ...]
    out: Path
    distil: bool = False
    seeds: int = SEEDS
    recipe: Recipe = field(default_factory=Recipe)
    sentences: int = SENTENCES
    budget: float = BUDGET
    save: bool = False
    threads: int = THREADS
    check: bool = False
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
        words = ["attnlab", "minilm", *([] if self.distil else [v.label for v in self.variants])]
        words += ["--out", out, "--sentences", str(self.sentences), "--threads", str(self.threads)]
        if self.distil:
            words += ["--distil", self.variants[0].label, "--seeds", str(self.seeds)]
            words += ["--steps", str(self.recipe.weight_steps), str(self.recipe.state_steps)]
            words += ["--budget", f"{self.budget:g}"]
            words += ["--save"] if self.save else []
        words += ["--check"] if self.check else []
        words += ["--format", self.form] if self.form != "table" else []
        words += [word for file in self.registry for word in ("--registry", file)]
        return shlex.join(words)

    def model_folder(self, label: str, seed: int) -> Path:
        """Where `--save` puts a student."""
        return self.out / f"{re.sub('[^A-Za-z0-9_.]+', '-', label)}-seed{seed}"


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "names",
        metavar="NAME",
        nargs="*",
        help="variants in front of all options: a name or pattern, or NAME:option=value,option=value; default: all",
    )
    add(
        "--distil",
        metavar="NAME",
        nargs="?",
        const=STUDENT,
        help=f"teach this variant, instead of looking at all; without a name: {STUDENT}",
    )
    add(
        "--seeds",
        metavar="N",
        help=f"trainings of --distil, each from other sentences in another order; default: {SEEDS}",
    )
    add(
        "--steps",
        metavar=("N", "M"),
        nargs=2,
        help=f"of --distil, on weights and on states; default: {Recipe().weight_steps} {Recipe().state_steps}",
    )
    add("--budget", metavar="SECONDS", help=f"a training that takes longer is ended and says so; default: {BUDGET:g}")
    add("--sentences", metavar="N", help=f"held-out sentences; default: {SENTENCES}")
    add("--save", action="store_true", default=None, help="with --distil: keep every student, 90 MB each")
    add(
        "--out",
        metavar="DIR",
        help=f"the run folder; one that holds a run is resumed, as it was begun; default: {folders.RUNS}/minilm/<time>",
    )
    add("--threads", metavar="N", help=f"torch's threads; default: {THREADS}")
    add("--check", action="store_true", help="exit code 1 where a goal is missed")
    add("--format", choices=("table", "json"), default="table", dest="form", help="on stdout")


def settle(args: Namespace, now: datetime | None = None) -> MiniLMSettings:
    """`MiniLMSettings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense."""
    out, recorded = run_folder.begun_or_new(args.out, "minilm", now or datetime.now(), SUMMARY, args, RECORDED)
    steps = args.steps or (Recipe().weight_steps, Recipe().state_steps)
    weight_steps, state_steps = (number("--steps", str(word), int, 0, MOST_STEPS) for word in steps)
    sentences = or_default(args.sentences, SENTENCES)
    settings = MiniLMSettings(
        variants=_variants(args),
        out=out,
        distil=args.distil is not None,
        seeds=number("--seeds", or_default(args.seeds, SEEDS), int, 1, MOST_SEEDS),
        recipe=Recipe(weight_steps=weight_steps, state_steps=state_steps),
        sentences=number("--sentences", sentences, int, LEAST_SENTENCES, MOST_SENTENCES),
        budget=number("--budget", or_default(args.budget, f"{BUDGET:g}"), float, 1),
        save=bool(args.save),
        threads=number("--threads", or_default(args.threads, THREADS), int, 1, MOST_THREADS),
        check=bool(args.check),
        form=args.form,
        registry=tuple(getattr(args, "registry", None) or ()),
    )
    if settings.save and not settings.distil:
        raise InvalidInput(
            "--save: expected --distil, which makes the models to save; add --distil or leave --save out"
        )
    run_folder.refuse_another(out, recorded, settings.recorded(), FLAGS)
    written = [SUMMARY]
    if settings.save:
        label = settings.variants[0].label
        written += [settings.model_folder(label, seed).name for seed in range(settings.seeds)]
    run_folder.refuse_replacing(out, SUMMARY, written)
    return settings


def _variants(args: Namespace) -> tuple[Chosen, ...]:
    if args.distil is None:
        return choose("minilm", args.names or ["*"])
    if args.names:
        raise InvalidInput(
            f"--distil: expected no other names, got {' '.join(args.names)}; look at them in a run without --distil"
        )
    result = choose("--distil", [args.distil])
    if len(result) != 1:
        raise InvalidInput(
            f"--distil: expected one variant, got {args.distil!r}, which matches {len(result)}; name one"
        )
    return result
