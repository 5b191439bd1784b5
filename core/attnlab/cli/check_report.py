"""What `attnlab check` prints of one variant: its topics, what failed, what was refused and what did not apply."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnlab.cli import tables, terminal

if TYPE_CHECKING:
    from attnlab.conformance import CheckResult

WRONG = ("failed", "error")
SHOWN = 2  # failures of one check that a report shows whole; all of them where the check was asked for
COLOUR = {"passed": "green", "failed": "red", "error": "red", "known failure": "yellow"}
# A report's order of words, and what a status means there.
STATUSES = ("passed", "failed", "error", "refused", "known failure", "not applicable")
REASON = 200  # characters of a reason why something does not apply


def report(
    name: str, results: Sequence[CheckResult], *, every: bool, unverified: str = "", seconds: float | None = None
) -> str:
    """One variant's topics with counts and times, then what failed by check: `every` case, or the first ones.

    unverified: why nothing outside the variant vouches for its formula, "" where something does. seconds: how long it took,
    where checks ran beside each other.
    """
    topics = grouped(results, "topic")
    wrong = [result for result in results if result.status in WRONG]
    verdict = terminal.paint("wrong", "red") if wrong else terminal.paint("right", "green")
    if all(result.status == "not applicable" for result in results):
        verdict = "not checked"
    took = _seconds(results) if seconds is None else f"{seconds:.1f} s"
    lines = [f"{terminal.paint(name, 'bold')}: {verdict} ({_counted(results)}; {took})"]
    if unverified:
        lines.append(f"  {terminal.paint('formula unverified', 'yellow')}: {unverified}")
    room = max((tables.display_width(topic) for topic in topics), default=0)
    for topic, members in topics.items():
        space = " " * (room - tables.display_width(topic))
        lines.append(f"  {topic}{space}  {_counted(members)}; {_seconds(members)}")
    told: set[str] = set()
    for members in grouped(wrong, "check").values():
        fresh = [one for one in members if every or _asks(one) not in told]
        if fresh:
            lines += ["", *_failures(fresh, len(fresh) if every else SHOWN)]
        told |= {_asks(one) for one in fresh}
    lines += _also(wrong) if not every else []
    for result in results:
        if result.status == "known failure":
            head = terminal.paint("known failure", "yellow")
            lines += ["", f"  {head}: {result.check}, {result.case}: {result.message}"]
    lines += _refused(results) + _not_applicable(results)
    return terminal.shown("\n".join([*lines, ""]))


def summary(results: Sequence[CheckResult], unusable: Mapping[str, str]) -> str:
    """One line over all variants."""
    variants = dict.fromkeys(result.variant for result in results)
    wrong = dict.fromkeys(result.variant for result in results if result.status in WRONG)
    judged = dict.fromkeys(result.variant for result in results if result.status != "not applicable")
    parts = [f"{len(judged) - len(wrong)} right"]
    parts += [f"{len(wrong)} wrong: {', '.join(wrong)}"] if wrong else []
    idle = [name for name in variants if name not in judged]
    parts += [f"{len(idle)} not checked: {', '.join(idle)}"] if idle else []
    parts += [f"{len(unusable)} unavailable: {', '.join(unusable)}"] if unusable else []
    return f"{len(variants) + len(unusable)} variants: {'; '.join(parts)}"


def grouped(results: Sequence[CheckResult], by: str) -> dict[str, list[CheckResult]]:
    """The results by one of their fields, in the order of appearance."""
    groups: dict[str, list[CheckResult]] = {}
    for result in results:
        groups.setdefault(getattr(result, by), []).append(result)
    return groups


def _asks(result: CheckResult) -> str:
    """What the smallest failing request asks for beside its sizes; the whole case where it was not shrunk."""
    words = result.smallest.split()
    return (
        " ".join(w for w in words if not w.startswith(_SIZES) and w != "float32")
        if words
        else f"{result.check} {result.case}"
    )


_SIZES = ("batch=", "heads=", "lengths=", "width=", "seed=")


def _also(wrong: Sequence[CheckResult]) -> list[str]:
    """`with causal window=(3,0) these fail too: ...`, for what several checks found, which only the first of them tells."""
    lines = []
    causes: dict[str, dict[str, int]] = {}
    for result in wrong:
        if result.smallest:
            counts = causes.setdefault(_asks(result), {})
            counts[result.check] = counts.get(result.check, 0) + 1
    for asks, counts in causes.items():
        first, *others = counts
        if others:
            named = ", ".join(f"{check} ({counts[check]})" for check in others)
            lines += ["", f"  {f'with {asks}' if asks else 'in a plain call'} these fail as {first} does: {named}"]
    return lines


def _failures(members: Sequence[CheckResult], limit: int) -> list[str]:
    """The failures of one check by cause: the first `limit` causes whole, each with what repeats it; the others counted."""
    lines = []
    shrunk = grouped([one for one in members if one.smallest], "smallest")
    causes = [*shrunk.values(), *([one] for one in members if not one.smallest)]
    for result, *others in causes[:limit]:
        line = result.smallest or result.case
        lines.append(
            f"  {terminal.paint(result.status, 'red')}: {result.check} ({result.topic}){f', {line}' if line else ''}"
        )
        lines.append(textwrap.indent(result.message.rstrip() or "no message", "    "))
        if others:
            lines.append(f"    {len(others) + 1} cases fail so; this is the smallest request that does")
        lines.append(f"    repeat: {result.repeat}")
    if len(causes) > limit:
        more = sum(len(one) for one in causes[limit:])
        lines.append(f"    and {more} more cases of {members[0].check}")
    return lines


def _refused(results: Sequence[CheckResult]) -> list[str]:
    """`refused as required: window, dtype float16, ...`, by what the cases asked for."""
    features = [r.message.partition(" is not declared")[0] or r.case for r in results if r.status == "refused"]
    return ["", f"  refused as required: {', '.join(dict.fromkeys(features))}"] if features else []


def _not_applicable(results: Sequence[CheckResult]) -> list[str]:
    """Each reason once, with the checks that it kept from running and how many of their cases."""
    reasons = grouped([r for r in results if r.status == "not applicable"], "message")
    lines = ["", "  not applicable:"] if reasons else []
    for reason, members in reasons.items():
        counts = Counter(member.check for member in members)
        checks = ", ".join(f"{check} ({n} cases)" if n > 1 else check for check, n in counts.items())
        lines.append(f"    {tables.shorten(reason or 'no reason given', REASON)}: {checks}")
    return lines


def _seconds(results: Sequence[CheckResult]) -> str:
    return f"{sum(result.seconds for result in results):.1f} s"


def _counted(results: Sequence[CheckResult]) -> str:
    """`12 passed, 1 failed, 3 refused`, in a fixed order, colours on what matters."""
    counts: Counter[str] = Counter(result.status for result in results)
    order = [*STATUSES, *sorted(set(counts) - set(STATUSES))]
    parts = [f"{counts[status]} {status}" for status in order if counts[status]]
    return ", ".join(
        terminal.paint(part, COLOUR[part.split(" ", 1)[1]]) if part.split(" ", 1)[1] in COLOUR else part
        for part in parts
    )
