"""`attnlab check --mutants`: the suite itself checked, by the mutants it must fail and the variants it must pass. Imports torch."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attnlab.cli import tables, terminal
from attnlab.errors import InvalidInput

if TYPE_CHECKING:
    from attnlab.conformance.running.kills import Alarms, Kill

KILL_COLUMNS = ("topic", "check", "mutant", "killed", "story")
RECORD_COLUMNS = ("topic", "check", "mutant", "owner", "killed", "cases", "seconds", "story", "message")


def run(form: str, only: Sequence[str] | None, quick: bool, workers: int) -> int:
    """Print the kill table, the false alarms and a summary.

    Returns 1 where a mutant survives its owner, a check of attnlab's own kills none, or a correct variant fails; else 0.
    """
    from attnlab.conformance.checks import ALL
    from attnlab.conformance.running import kills
    from attnlab.conformance.running.plan import selected

    started = time.monotonic()
    checks = selected(only)
    if not kills.mutants():
        raise InvalidInput(
            "check --mutants: no mutants are installed; attnlab's own come with its package attnlab_evaluations "
            "(is it installed, and not named in ATTNLAB_DISABLE?), others by the hook attnlab_mutants"
        )
    results: list[Kill] = []
    alarms: list[Alarms] = []
    with terminal.progress("killing mutants") as line:
        number = len(kills.pairs(only))
        for kill in kills.iter_kills(only, workers):
            results.append(kill)
            line.text = f"killing mutants: {len(results)} of {number}, {kill.mutant}"
        number = len(kills.correct_variants())
        line.text = f"looking for false alarms in {number} correct variants"
        for alarm in kills.iter_alarms(only=only, quick=quick, workers=workers):
            alarms.append(alarm)
            line.text = f"looking for false alarms: {len(alarms)} of {number}, {alarm.variant}"
    killing = {kill.check for kill in results if kill.killed}
    own = {check.name for check in ALL}
    idle = [check.name for check in checks if check.name in own - killing]
    unproved = [] if only is None else [check.name for check in checks if check.name not in own | killing]
    order = {check.name: position for position, check in enumerate(checks)}
    results.sort(key=lambda kill: order[kill.check])
    if form == "table":
        _print_tables(results, alarms, idle)
        text = summary(results, alarms, idle, [check.name for check in checks], time.monotonic() - started)
        print(f"\n{terminal.shown(text)}")
    else:
        print(tables.render([_record(kill) for kill in results], RECORD_COLUMNS, form))
    for name in unproved:
        terminal.say(
            f"{name} kills no mutant, so that nothing proves it: add a mutant with the mistake that it is written for"
        )
    wrong = bool(idle) or any(kill.missed for kill in results) or any(alarm.failed for alarm in alarms)
    if wrong and form != "table":
        terminal.say(
            "a mutant survives, a check kills nothing or a correct variant fails; see the table without --format"
        )
    return 1 if wrong else 0


def _record(kill: Kill) -> dict[str, Any]:
    return {**asdict(kill), "seconds": round(kill.seconds, 3)}


def _print_tables(results: Sequence[Kill], alarms: Sequence[Alarms], idle: Sequence[str]) -> None:
    """The mutants that are killed or owned, the correct variants, then each fault in whole sentences."""
    rows = [asdict(kill) for kill in results if kill.killed or kill.missed]
    if rows:
        print(tables.render(rows, KILL_COLUMNS, "table"))
        print()
    correct = [
        {"correct variant": a.variant, "cases": a.cases, "false alarms": len(a.failed), "seconds": f"{a.seconds:.1f}"}
        for a in alarms
    ]
    print(tables.render(correct, ("correct variant", "cases", "false alarms", "seconds"), "table"))
    for kill in results:
        if kill.missed:
            print(f"\n{terminal.paint('survived', 'red')}: {kill.mutant} ({kill.story}); {kill.check} passes it")
    for alarm in alarms:
        for result in alarm.failed:
            head = f"{terminal.paint('false alarm', 'red')}: {alarm.variant}, {result.check} [{result.case}]"
            print(f"\n{head}\n{textwrap.indent(result.message, '    ')}")
    for name in idle:
        print(f"\n{terminal.paint('idle', 'red')}: {name} kills no mutant")


def summary(
    results: Sequence[Kill], alarms: Sequence[Alarms], idle: Sequence[str], checks: Sequence[str], seconds: float
) -> str:
    """`214 of 214 mutants killed (100.0 %), ...` in a few lines."""
    lines = []
    owned = [kill for kill in results if kill.check == kill.owner]
    if owned:
        count = sum(kill.killed for kill in owned)
        lines.append(
            f"{count} of {len(owned)} mutants killed ({100 * count / len(owned):.1f} %), "
            "each by the check that owns its kind of mistake"
        )
    for name in checks:
        others = [kill.killed for kill in results if kill.check == name != kill.owner]
        if others:
            lines.append(f"{name} kills {sum(others)} of {len(others)} mutants of other checks")
    killing = {kill.check for kill in results if kill.killed}
    total = len({kill.check for kill in results} | set(idle))
    lines.append(f"{len(killing)} of {total} check{' kills' if total == 1 else 's kill'} at least one mutant")
    false = sum(len(alarm.failed) for alarm in alarms)
    cases = sum(alarm.cases for alarm in alarms)
    plural = "" if false == 1 else "s"
    lines.append(f"{false} false alarm{plural} over {len(alarms)} correct variants ({cases} cases)")
    lines.append(f"{seconds:.0f} s")
    return "\n".join(lines)
