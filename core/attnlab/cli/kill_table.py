"""`attnlab check --mutants`: the suite itself judged, by what it must fail and what it must let pass. Imports torch."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attnlab.cli import tables, terminal

if TYPE_CHECKING:
    from attnlab.conformance.running.kills import Alarms, Kill

KILL_COLUMNS = ("topic", "check", "mutant", "killed", "story")
RECORD_COLUMNS = ("topic", "check", "mutant", "killed", "cases", "seconds", "story", "message")


def run(form: str, quick: bool, workers: int) -> int:
    """Print the kill table, the alarms and the sum of both; 1 where a mutant lives, a check is idle or an alarm is false."""
    from attnlab.conformance.checks import ALL
    from attnlab.conformance.running import kills
    from attnlab_evaluations.suite_proof.mutants import MUTANTS

    started = time.monotonic()
    results: list[Kill] = []
    alarms: list[Alarms] = []
    with terminal.progress("killing mutants") as line:
        for kill in kills.iter_kills(workers):
            results.append(kill)
            line.text = f"killing mutants: {len(results)} of {len(MUTANTS)}, {kill.mutant}"
        number = len(kills.correct_variants())
        line.text = f"looking for false alarms in {number} correct variants"
        for alarm in kills.iter_alarms(quick=quick, workers=workers):
            alarms.append(alarm)
            line.text = f"looking for false alarms: {len(alarms)} of {number}, {alarm.variant}"
    killing = {kill.check for kill in results if kill.killed}
    idle = [check.name for check in ALL if check.name not in killing]
    order = {check.name: position for position, check in enumerate(ALL)}
    results.sort(key=lambda kill: order[kill.check])
    if form == "table":
        _print_tables(results, alarms, idle, time.monotonic() - started)
    else:
        print(tables.render([_record(kill) for kill in results], RECORD_COLUMNS, form))
    wrong = idle or any(not kill.killed for kill in results) or any(alarm.failed for alarm in alarms)
    if wrong and form != "table":
        terminal.say("a mutant lives, a check kills nothing or an alarm is false; see the table without --format")
    return 1 if wrong else 0


def _record(kill: Kill) -> dict[str, Any]:
    return {**asdict(kill), "seconds": round(kill.seconds, 3)}


def _print_tables(found: Sequence[Kill], alarms: Sequence[Alarms], idle: Sequence[str], seconds: float) -> None:
    rows = [
        {"topic": k.topic, "check": k.check, "mutant": k.mutant, "killed": k.killed, "story": k.story} for k in found
    ]
    print(tables.render(rows, KILL_COLUMNS, "table"))
    print()
    correct = [
        {"correct variant": a.variant, "cases": a.cases, "false alarms": len(a.failed), "seconds": f"{a.seconds:.1f}"}
        for a in alarms
    ]
    print(tables.render(correct, ("correct variant", "cases", "false alarms", "seconds"), "table"))
    for kill in found:
        if not kill.killed:
            print(f"\n{terminal.paint('survived', 'red')}: {kill.mutant} ({kill.story}); {kill.check} passes it")
    for alarm in alarms:
        for result in alarm.failed:
            head = f"{terminal.paint('false alarm', 'red')}: {alarm.variant}, {result.check} [{result.case}]"
            print(f"\n{head}\n{textwrap.indent(result.message, '    ')}")
    for name in idle:
        print(f"\n{terminal.paint('idle', 'red')}: {name} kills no mutant")
    print()
    print(terminal.shown(summary(found, alarms, idle, seconds)))


def summary(found: Sequence[Kill], alarms: Sequence[Alarms], idle: Sequence[str], seconds: float) -> str:
    """`214 of 214 mutants killed (100.0 %), ...` in a few lines."""
    count = Counter(kill.killed for kill in found)
    share = 100 * count[True] / len(found) if found else 0.0
    checks = len({kill.check for kill in found if kill.killed})
    false = sum(len(alarm.failed) for alarm in alarms)
    cases = sum(alarm.cases for alarm in alarms)
    return (
        f"{count[True]} of {len(found)} mutants killed ({share:.1f} %), each by the check that owns its kind\n"
        f"{checks} of {checks + len(idle)} checks kill at least one\n"
        f"{false} false alarm{'' if false == 1 else 's'} over {len(alarms)} correct variants ({cases} cases)\n"
        f"{seconds:.0f} s"
    )
