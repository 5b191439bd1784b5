"""`attnlab check NAME...`: the conformance report by topic. Imports torch, through `attnlab.conformance`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnlab._quoting import quoted, short
from attnlab.capabilities import DEVICES
from attnlab.cli import tables, terminal
from attnlab.cli.check_report import WRONG, report, summary
from attnlab.cli.selection import is_pattern, select
from attnlab.errors import InvalidInput, PluginError, VariantUnavailable, nearest

if TYPE_CHECKING:
    from attnlab.conformance import CheckResult

EXAMPLES = """\
examples:
  attnlab check dot_product                          all checks of one variant
  attnlab check '*' --quick                          fewer cases of each check
  attnlab check flash --only gradients               one topic, or one check by its name
  attnlab check flash --device cuda
  attnlab check additive --format json > report.json
  attnlab check --mutants                            is the suite itself right? its kill table, 2 to 5 minutes

The first failures of each check are shown, each with the command that repeats that case; --only shows them all.
Exit code 1 if anything failed, 2 if nothing could be checked."""

COLUMNS = ("variant", "topic", "check", "case", "status", "seconds", "message", "repeat")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="variants, or patterns such as 'multiplicative*'"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHECK",
        help="one check or one topic by name; may be given more than once",
    )
    parser.add_argument(
        "--case",
        metavar="ID",
        help="one case of the checks by its id, or a pattern of ids: 'float16-causal*'",
    )
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="judge the suite instead: every mutant must be killed, no correct variant accused",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps, ..."
    )
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

    if args.mutants:
        return _judge_the_suite(args)
    if not args.names:
        raise InvalidInput(
            "check: give a NAME, '*' for all variants, or --mutants; `attnlab list` shows the names"
        )
    names = select(args.names, default_registry().names())
    _require_device(args.device)
    exact = {name for name in args.names if not is_pattern(name)}
    results: list[CheckResult] = []
    unusable: dict[str, str] = {}
    for number, name in enumerate(names, 1):
        counted = f" ({number} of {len(names)})" if len(names) > 1 else ""
        try:
            found = _checked(name, args, f"checking {name}{counted}")
        except (VariantUnavailable, PluginError) as problem:
            unusable[name] = str(problem)
            terminal.say(str(problem))
            continue
        results += found
        if args.format == "table":
            print(report(name, found, every=bool(args.only), unverified=_unverified(name)), flush=True)
    if args.format != "table":
        print(tables.render([record(result) for result in results], COLUMNS, args.format))
    elif len(names) > 1:
        print(summary(results, unusable))
    if any(result.status in WRONG for result in results):
        return 1
    if all(result.status == "not applicable" for result in results) and not unusable:
        why = next((result.message for result in results if result.message), "no check applies")
        raise InvalidInput(f"nothing was checked of {', '.join(names)}: {why}")
    return 2 if exact & set(unusable) or not results else 0


def _judge_the_suite(args: argparse.Namespace) -> int:
    """`--mutants`: what would be ignored beside it is refused."""
    from attnlab.cli import kill_table

    useless = [f"NAME ({short(args.names[0])})"] if args.names else []
    useless += [f"--{word}" for word in ("only", "case") if getattr(args, word)]
    useless += ["--device"] if args.device != "cpu" else []
    if useless:
        raise InvalidInput(f"--mutants judges the whole suite on the CPU; leave out {', '.join(useless)}")
    return kill_table.run(args.format, args.quick)


def _unverified(name: str) -> str:
    from attnlab.conformance import why_unverified

    return why_unverified(name)


def _require_device(name: str) -> None:
    """`InvalidInput` unless torch can put a tensor on the device."""
    kind, colon, number = name.partition(":")
    said, there = f"--device {short(name)}: ", "`attnlab doctor` shows the devices here"
    known = [device for device in DEVICES if device != "meta"]  # which holds shapes and no values to compare
    if kind not in known:
        raise InvalidInput(
            f"{said}expected a device to compute on, got {quoted(kind)}; {nearest(kind, known)}; {there}"
        )
    if colon and not (number.isascii() and number.isdecimal()):
        raise InvalidInput(f"{said}expected a whole number after the colon, such as {kind}:0")
    import torch

    try:
        torch.empty(1, device=name)
    except Exception as problem:
        # By device and build, torch raises AssertionError, RuntimeError, ImportError or an error of its own.
        words = (str(problem).splitlines() or [type(problem).__name__])[0].partition(". ")[0]
        raise InvalidInput(f"{said}{short(words.removesuffix('.'), 200)}; {there}") from None


def _checked(name: str, args: argparse.Namespace, title: str) -> list[CheckResult]:
    """All results of one variant; on a terminal, the number of cases so far and the last check are shown."""
    from attnlab.conformance import iter_checks

    found: list[CheckResult] = []
    with terminal.progress(title) as line:
        for result in iter_checks(name, only=args.only, case=args.case, quick=args.quick, device=args.device):
            found.append(_with_registry(result, args.registry))
            line.text = f"{title}: {len(found)} cases, {result.check}"
    return found


def _with_registry(result: CheckResult, files: list[str]) -> CheckResult:
    """The result, with the registry files of this call in the command that repeats it."""
    return (
        replace(result, options=" ".join(f"--registry {shlex.quote(str(file))}" for file in files))
        if files
        else result
    )


def record(result: CheckResult) -> dict[str, Any]:
    """One result as JSON has it."""
    return {
        "variant": result.variant,
        "topic": result.topic,
        "check": result.check,
        "case": result.case,
        "status": result.status,
        "seconds": round(result.seconds, 4),
        "message": result.message,
        "repeat": result.repeat,
    }
