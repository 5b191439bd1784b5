"""The settings of `attnlab gpu-check`, read from the command line and validated. Imports no torch."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import attnlab
from attnlab import InvalidInput, UnknownVariant
from attnlab.errors import nearest
from attnlab_evaluations.frame import folders, run_folder
from attnlab_evaluations.tasks.compare.settings import number, or_default

BUDGET = 520.0
"""Seconds of the whole run: below 9 minutes with what Python takes to begin and end."""
TIMED = ("flash", "dot_product", "sliding_window")
"""The variants of the speed table; their conformance comes first."""
SUMMARY = "gpu-check.json"
EXAMPLES = f"""\
examples:
  attnlab gpu-check                                  conformance, then speed, within 9 minutes
  attnlab gpu-check --out my-run                     again with the same folder: goes on where it ended
  attnlab gpu-check --only flash --budget 120
  attnlab gpu-check --device cuda:1 --format json > gpu.json
  attnlab gpu-check --device cpu --only flash --budget 30    its own logic, on one tiny shape

Every variant that declares the device has its quick conformance checks run, for at most half of the time. Then
{", ".join(TIMED)} are timed in bfloat16 beside each backend of torch's scaled_dot_product_attention:
16 heads, batch * length = 16384. FLOPs: forward 4 B H Lq Lk D, causal half, a window of w keys in place of Lk;
backward 2.5 times the forward. The folder gets results.jsonl and {SUMMARY}; results of the same code on the
same machine are not measured again. Exit code 0: every variant passed; 1: something failed, or was not checked
for lack of time; 2: the device is not there."""


RECORDED: dict[str, Callable[[Any], Any]] = {
    "only": lambda kept: list(kept["only"]),
    "budget": lambda kept: f"{kept['budget']:g}",
    "device": lambda kept: kept["device"],
}
"""How a run's recorded settings read on the command line, by option."""
FLAGS = {"only": "--only", "device": "--device", "variants": "--only"}


@dataclass(frozen=True)
class GpuSettings:
    """A run, fully spelled out; `in_process`: checks run in the process that asks, with no others beside it."""

    variants: tuple[str, ...]
    out: Path
    device: str = "cuda"
    budget: float = BUDGET
    form: str = "table"
    only: tuple[str, ...] = ()
    registry: tuple[str, ...] = ()
    in_process: bool = False

    @property
    def kind(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]

    def recorded(self) -> dict[str, Any]:
        """What the summary keeps: no folder or file names, which may hold a person's."""
        return {"device": self.device, "budget": self.budget, "variants": self.variants, "only": self.only}

    def resume_command(self) -> str:
        """What to type to go on with this run."""
        out = str(self.out)
        out = os.path.join(os.curdir, out) if out.startswith("-") else out
        words = ["attnlab", "gpu-check", "--out", out, "--device", self.device, "--budget", f"{self.budget:g}"]
        words += ["--only", *self.only] if self.only else []
        words += [word for file in self.registry for word in ("--registry", file)]
        return shlex.join(words)


def configure(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", help="cuda, cuda:1, or cpu to try the command; default: cuda")
    add("--budget", metavar="SECONDS", help=f"time for all of it; default: {BUDGET:g}")
    add(
        "--out",
        metavar="FOLDER",
        help=f"the run folder; one that holds a run is resumed, as it was begun; default: {folders.RUNS}/gpu-check/<time>",
    )
    add("--only", metavar="NAME", nargs="+", default=[], help="these variants; default: all for the device")
    add("--format", choices=("table", "json"), default="table", dest="form", help="on stdout")


def settle(args: Namespace, now: datetime | None = None) -> GpuSettings:
    """`GpuSettings` from parsed arguments; `InvalidInput` or `UnknownVariant` for what makes no sense."""
    out, recorded = run_folder.begun_or_new(args.out, "gpu-check", now or datetime.now(), SUMMARY, args, RECORDED)
    device = or_default(args.device, "cuda")
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InvalidInput(f"--device: expected cuda or cpu, got {device!r}; leave --device out for cuda")
    run_folder.refuse_replacing(out, SUMMARY, [SUMMARY])
    settings = GpuSettings(
        variants=_variants(args.only, kind),
        out=out,
        device=device,
        budget=number("--budget", or_default(args.budget, f"{BUDGET:g}"), float, 1),
        form=args.form,
        only=tuple(args.only),
        registry=tuple(getattr(args, "registry", None) or ()),
        in_process=bool(getattr(args, "in_process", False)),
    )
    run_folder.refuse_another(out, recorded, settings.recorded(), FLAGS)
    return settings


def _variants(only: list[str], kind: str) -> tuple[str, ...]:
    """The variants for the device: those that are timed first, presets last."""
    known = attnlab.names()
    for name in only:
        if name not in known:
            raise UnknownVariant(f"--only: no variant is called {name!r}; {nearest(name, known)}")
    # A row that says nothing of devices is tried: the checks find out.
    able = [name for name in only or known if kind in (attnlab.info(name).devices or [kind])]
    if not able:
        raise InvalidInput(
            f"--only: expected variants for {kind}, got {', '.join(only) or 'none'}; "
            f"`attnlab info NAME` shows a variant's devices"
        )
    able.sort(key=lambda name: (name not in TIMED, attnlab.info(name).extends is not None))
    return tuple(dict.fromkeys(able))
