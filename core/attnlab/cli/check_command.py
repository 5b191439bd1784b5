"""`attnlab check NAME...`: the conformance report by topic. Imports torch, through `attnlab.conformance`."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab.cli import tables, terminal
from attnlab.cli.selection import is_pattern, select
from attnlab.errors import InvalidInput, PluginError, VariantUnavailable

if TYPE_CHECKING:
    from attnlab.conformance import CheckResult

EXAMPLES = """\
examples:
  attnlab check dot_product                          all checks of one variant
  attnlab check '*' --quick                          fewer cases of each check
  attnlab check flash --only gradients               one topic, or one check by its name
  attnlab check flash --device cuda
  attnlab check additive --format json > report.json

The first failures of each check are shown, with the command that repeats it and shows them all. Exit code 1
if anything failed, 2 if nothing could be checked."""

WRONG = ("failed", "error")
SHOWN = 2  # failures of one check that a report shows whole; all of them where the check was asked for
COLUMNS = ("variant", "topic", "check", "case", "status", "seconds", "message", "repeat")
COLOUR = {"passed": "green", "failed": "red", "error": "red", "known failure": "yellow"}
# A report's order of words, and what a status means there.
STATUSES = ("passed", "failed", "error", "refused", "known failure", "not applicable")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="variants, or patterns such as 'multiplicative*'"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--only",
        action="append",
        metavar="CHECK",
        help="one check or one topic by name; may be given more than once",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu (default), cuda, cuda:1, mps, ..."
    )
    parser.add_argument("--format", choices=tables.FORMATS, default="table")


def run(args: argparse.Namespace) -> int:
    from attnlab.catalogue import default_registry

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
            print(_report(name, found, every=bool(args.only)), flush=True)
    if args.format != "table":
        print(tables.render([record(result) for result in results], COLUMNS, args.format))
    elif len(names) > 1:
        print(_summary(results, unusable))
    if any(result.status in WRONG for result in results):
        return 1
    if all(result.status == "not applicable" for result in results) and not unusable:
        why = next((result.message for result in results if result.message), "no check applies")
        raise InvalidInput(f"nothing was checked of {', '.join(names)}: {why}")
    return 2 if exact & set(unusable) or not results else 0


def _require_device(name: str) -> None:
    """`InvalidInput` unless torch can put a tensor on the device."""
    import torch

    try:
        torch.empty(1, device=name)
    except Exception as problem:
        reason = str(problem).splitlines()[0].removesuffix(".")
        raise InvalidInput(f"--device {name}: {reason}; `attnlab doctor` shows the devices here") from None


def _checked(name: str, args: argparse.Namespace, title: str) -> list[CheckResult]:
    """All results of one variant; on a terminal, the number of cases so far and the last check are shown."""
    from attnlab.conformance import iter_checks

    found: list[CheckResult] = []
    with terminal.progress(title) as line:
        for result in iter_checks(name, only=args.only, quick=args.quick, device=args.device):
            found.append(result)
            line.text = f"{title}: {len(found)} cases, {result.check}"
    return found


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


def _report(name: str, results: Sequence[CheckResult], every: bool) -> str:
    """One variant's topics with their counts, then what failed by check: `every` case, or the first ones."""
    topics = _grouped(results, "topic")
    wrong = [result for result in results if result.status in WRONG]
    verdict = terminal.paint("wrong", "red") if wrong else terminal.paint("right", "green")
    if all(result.status == "not applicable" for result in results):
        verdict = "not checked"
    seconds = sum(result.seconds for result in results)
    lines = [f"{terminal.paint(name, 'bold')}: {verdict} ({_counted(results)}; {seconds:.1f} s)"]
    room = max((tables.display_width(topic) for topic in topics), default=0)
    for topic, members in topics.items():
        lines.append(f"  {topic}{' ' * (room - tables.display_width(topic))}  {_counted(members)}")
    for members in _grouped(wrong, "check").values():
        lines += ["", *_failures(members, len(members) if every else SHOWN)]
    for result in results:
        if result.status == "known failure":
            head = terminal.paint("known failure", "yellow")
            lines += ["", f"  {head}: {result.check}, {result.case}: {result.message}"]
    return terminal.shown("\n".join([*lines, ""]))


def _grouped(results: Sequence[CheckResult], by: str) -> dict[str, list[CheckResult]]:
    groups: dict[str, list[CheckResult]] = {}
    for result in results:
        groups.setdefault(getattr(result, by), []).append(result)
    return groups


def _failures(members: Sequence[CheckResult], limit: int) -> list[str]:
    """The failures of one check: the first `limit` whole, the others counted, and what repeats the check."""
    lines = []
    for result in members[:limit]:
        lines.append(
            f"  {terminal.paint(result.status, 'red')}: {result.check} ({result.topic}), {result.case}"
        )
        lines.append(textwrap.indent(result.message.rstrip() or "no message", "    "))
    if len(members) > limit:
        lines.append(f"    and {len(members) - limit} more cases of {members[0].check}")
    return [*lines, f"    repeat: {members[0].repeat}"]


def _counted(results: Sequence[CheckResult]) -> str:
    """`12 passed, 1 failed, 3 refused`, in a fixed order, colours on what matters."""
    counts: Counter[str] = Counter(result.status for result in results)
    order = [*STATUSES, *sorted(set(counts) - set(STATUSES))]
    parts = [f"{counts[status]} {status}" for status in order if counts[status]]
    return ", ".join(
        terminal.paint(part, COLOUR[part.split(" ", 1)[1]]) if part.split(" ", 1)[1] in COLOUR else part
        for part in parts
    )


def _summary(results: Sequence[CheckResult], unusable: dict[str, str]) -> str:
    variants = dict.fromkeys(result.variant for result in results)
    wrong = dict.fromkeys(result.variant for result in results if result.status in WRONG)
    parts = [f"{len(variants) - len(wrong)} right"]
    parts += [f"{len(wrong)} wrong: {', '.join(wrong)}"] if wrong else []
    parts += [f"{len(unusable)} unavailable: {', '.join(unusable)}"] if unusable else []
    return f"{len(variants) + len(unusable)} variants: {'; '.join(parts)}"
