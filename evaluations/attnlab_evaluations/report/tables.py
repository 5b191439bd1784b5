"""Tables of a run for the terminal, Markdown, CSV and JSON, from rows. Needs tabulate.

A cell holds a number, or a status word with its reason; never nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tabulate import tabulate

from attnlab_evaluations.measure.claims import OPEN, Null
from attnlab_evaluations.measure.timing import LEVEL
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.compare.rows import MISSING, PHASES, Row
from attnlab_evaluations.tasks.compare.settings import REFERENCE

LEGEND = (
    "times: median milliseconds [95% interval]; ratio: to dot_product, paired by round [95% interval]; another level than 95% "
    "stands beside its interval; faster, slower: beyond the null controls' floor, corrected for all ratios of the table (Holm); "
    "same: the interval lies within 2%; not told apart: neither; ~ spread over 10% of the median; "
    "tensors: peak MiB of torch's allocator beyond the inputs, in one call; the process's own memory can grow by several "
    "times that, as the system's allocator keeps room; "
    "error: largest difference from the float64 definition, over all rows or those that are named; "
    "exponent: slope of log forward time in log length [95% interval]"
)
NOT_APPLICABLE = "n/a"
_NUMBERS = ("median", "low", "high")


def level_text(level: float | None) -> str:
    """` at 75%` beside an interval that is less sure than 95%; nothing beside others."""
    if level is None or level >= LEVEL:
        return ""
    return f" at {100 * level:.0f}%" if level > 0 else " at an unknown level"


def milliseconds(seconds: float) -> str:
    """Three digits: `0.123`, `1.23`, `12.3`, `123`, `1234`."""
    value = seconds * 1e3
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _time(row: Row, phase: str) -> str:
    median, low, high = (row.value(phase, n) for n in _NUMBERS)
    if median is None:
        return row.word(phase)
    mark = "~" if row.value(phase, "noisy") else ""
    level = level_text(row.value(phase, "level"))
    return f"{milliseconds(median)} [{milliseconds(low)}, {milliseconds(high)}]{level}{mark}"


def _ratio(row: Row, phase: str) -> str:
    ratio = row.value(phase, "ratio")
    if ratio is None:
        return row.word(phase).partition(" (")[0] if row.value(phase, "median") is None else "no reference"
    if row.variant == REFERENCE:
        return "reference"
    interval = f"[{ratio['low']:.2f}, {ratio['high']:.2f}]{level_text(ratio.get('level'))}"
    return f"{ratio['median']:.2f}x {interval} {row.claims.get(phase, OPEN)}"


def _extra(row: Row, phase: str) -> str:
    extra = row.value(f"memory_{phase}", "bytes")
    return row.word(f"memory_{phase}") if extra is None else f"{extra / 2**20:.1f}"


def _error(row: Row) -> str:
    error = row.value("error", "worst")
    if error is None:
        return row.word("error")
    rows, total = row.value("error", "rows"), row.value("error", "total")
    return f"{error:.1e}" + ("" if rows == total else f" ({rows} of {total} rows)")


def _cosine(row: Row, which: str) -> str:
    cosine = row.value("moves", which)
    return row.word("moves") if cosine is None else f"{cosine:.6f}"


def _exponent(row: Row, phase: str) -> str:
    slope = row.exponents.get(phase)
    if slope is None:
        return NOT_APPLICABLE
    return f"{slope.median:.2f} [{slope.low:.2f}, {slope.high:.2f}]{level_text(slope.level)}"


def status_text(row: Row) -> str:
    """The status word with its reason, and a dagger with the checks that are known to fail."""
    text = f"{row.status}: {row.reason}" if row.reason else row.status
    return f"{text} † {', '.join(row.known)}" if row.known else text


@dataclass(frozen=True)
class Column:
    """One column: its header, what stands in a row's cell, and the group of metrics that it belongs to."""

    header: str
    cell: Callable[[Row], str]
    group: str


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that these rows of one workload have in common."""
    made = [Column("variant", lambda r: r.variant, "key")]
    for name in dict.fromkeys(n for row in rows for n in row.coordinates):
        cell = partial(_coordinate, name=name)
        made.append(Column(name, cell, "key"))
    made += [Column("status", status_text, "status"), Column("error", _error, "status")]
    for phase, short in zip(PHASES, ("forward", "fwd+bwd"), strict=True):
        made.append(Column(f"{short} ms", partial(_time, phase=phase), short))
        made.append(Column(f"{short} ratio", partial(_ratio, phase=phase), short))
    for phase, short in zip(PHASES, ("forward", "fwd+bwd"), strict=True):
        made.append(Column(f"tensors {short} MiB", partial(_extra, phase=phase), "memory"))
    if any("length" in row.coordinates for row in rows):
        made.append(Column("exponent", partial(_exponent, phase="forward"), "scaling"))
    if any("moves" in row.metrics for row in rows):
        made.append(Column("cosine mean", partial(_cosine, which="cosine_mean"), "effect"))
        made.append(Column("cosine worst", partial(_cosine, which="cosine_worst"), "effect"))
    for metric, numbers in plugin_metrics(rows).items():
        for number in numbers:
            cell = partial(_number, metric=metric, number=number)
            made.append(Column(f"{metric} {number}", cell, metric))
    return made


BUILT_IN = ("error", "moves", *PHASES, *(f"memory_{phase}" for phase in PHASES))


def plugin_metrics(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The metrics of plugins that these rows hold, with the names of their values; `value` where a metric gave none."""
    results: dict[str, list[str]] = {}
    for row in rows:
        for metric, record in row.metrics.items():
            if metric in BUILT_IN:
                continue
            names = results.setdefault(metric, [])
            value = record.get("value")
            names += [n for n in (value if isinstance(value, dict) else {}) if n not in names]
    return {metric: names or ["value"] for metric, names in results.items()}


def _number(row: Row, metric: str, number: str) -> str:
    value = row.value(metric, number)
    if value is None:
        return row.word(metric)
    if isinstance(value, float):
        return f"{value:.4g}"
    return _plain(value)


def _coordinate(row: Row, name: str) -> str:
    return _plain(row.coordinates.get(name, NOT_APPLICABLE))


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _of_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    parted: dict[str, list[Row]] = {}
    for row in rows:
        parted.setdefault(row.workload, []).append(row)
    return parted


def terminal(rows: Sequence[Row], null: Null, notes: Sequence[str] = (), *, width: int | None = None) -> str:
    """One table a workload and problem, within the terminal's width; what has no number is told once, below."""
    parts = []
    for workload, members in _of_workload(rows).items():
        shown, told = _folded(members)
        places: dict[str, list[Row]] = {}
        for row in shown:
            place = ", ".join(f"{name} {_plain(value)}" for name, value in row.coordinates.items())
            places.setdefault(place, []).append(row)
        for place, inside in places.items():
            cols = [c for c in columns(members) if c.header == "variant" or c.group != "key"]
            groups = [c.group for c in cols[1:]]
            numbers = [groups.index(group) for group in groups]
            body = [[c.cell(row) for c in cols] for row in inside]
            drawn = layout.table([c.header for c in cols], body, groups=numbers, width=width)
            parts.append(f"{workload}: {place}\n{drawn}" if place else f"{workload}\n{drawn}")
        if told:
            parts.append(layout.paragraphs([f"{workload}: {line}" for line in told], width))
    end = layout.paragraphs([null.sentence(), LEGEND, *notes], width)
    return "\n\n".join([*parts, end]) + "\n"


def _folded(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows that hold any number, and a line for each reason why others hold none, with those that it concerns."""
    shown: list[Row] = []
    reasons: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if any(row.value(metric, name) is not None for metric, name in _known(row)):
            shown.append(row)
        else:
            reasons.setdefault(_why(row), {}).setdefault(row.variant, []).append(row)
    counts = {row.variant: sum(r.variant == row.variant for r in rows) for row in rows}
    lines = []
    for why, concerned in reasons.items():
        names = [
            name if len(without) == counts[name] else f"{name} ({'; '.join(_place(r) for r in without)})"
            for name, without in concerned.items()
        ]
        lines.append(f"{why}: {', '.join(names)}")
    return shown, lines


def _known(row: Row) -> list[tuple[str, str]]:
    return [(m, n) for m, r in row.metrics.items() if isinstance(r.get("value"), dict) for n in r["value"]]


def _why(row: Row) -> str:
    """Why a row holds no number: its own status, or the word that all its metrics have, without seconds and bytes."""
    if row.status in ("wrong", "unsupported"):
        return f"{row.status}: {row.reason}" if row.reason else row.status
    words = dict.fromkeys(str(record["status"]) for record in row.metrics.values())
    return " or ".join(words) or MISSING


def _place(row: Row) -> str:
    words = []
    for name, value in row.coordinates.items():
        words.append(name if value is True else f"not {name}" if value is False else f"{name} {value}")
    return ", ".join(words)


def markdown(rows: Sequence[Row], null: Null, notes: Sequence[str] = ()) -> str:
    """Every row and column in GitHub's Markdown, reasons in full."""
    parts = ["# attnlab compare"]
    for workload, members in _of_workload(rows).items():
        cols = columns(members)
        body = [[c.cell(row).replace("|", "\\|").replace("\n", " ") for c in cols] for row in members]
        table = tabulate(body, headers=[c.header for c in cols], tablefmt="github", disable_numparse=True)
        parts.append(f"## {workload}\n\n{table}")
    return "\n\n".join([*parts, *(f"{line}" for line in (null.sentence(), LEGEND, *notes))]) + "\n"


def flat(row: Row) -> dict[str, Any]:
    """One row as plain fields: numbers where there are numbers, otherwise the status word."""
    results: dict[str, Any] = {"workload": row.workload, "variant": row.variant}
    for name in ("length", "causal", "layers"):
        results[name] = row.coordinates.get(name, NOT_APPLICABLE)
    results.update({n: v for n, v in row.coordinates.items() if n not in results})
    results["status"] = row.status
    results["reason"] = row.reason or NOT_APPLICABLE
    results["known_failures"] = ", ".join(row.known) or "none"

    def put(key: str, metric: str, value: Any) -> None:
        results[key] = row.word(metric).partition(" (")[0] if value is None else value

    put("error", "error", row.value("error", "worst"))
    for name in ("rows", "total", "bound"):
        put(f"error_{name}", "error", row.value("error", name))
    for phase in PHASES:
        for name in (*_NUMBERS, "level"):
            put(f"{phase}_seconds_{name}", phase, row.value(phase, name))
        ratio = row.value(phase, "ratio") or {}
        for name in (*_NUMBERS, "level"):
            missing = row.value(phase, "median") is not None and not ratio
            put(f"{phase}_ratio_{name}", phase, "no reference" if missing else ratio.get(name))
        put(f"{phase}_rounds", phase, row.value(phase, "rounds"))
        put(f"{phase}_noisy", phase, row.value(phase, "noisy"))
        results[f"{phase}_verdict"] = row.claims.get(phase, "none claimed")
        put(f"{phase}_extra_bytes", f"memory_{phase}", row.value(f"memory_{phase}", "bytes"))
        slope = row.exponents.get(phase)
        for name, end in (("median", ""), ("low", "_low"), ("high", "_high")):
            results[f"{phase}_exponent{end}"] = NOT_APPLICABLE if slope is None else getattr(slope, name)
        put(f"{phase}_first_call_seconds", phase, row.value(phase, "first_call"))
    gflops = row.value("forward", "gflops")
    results["forward_gflops"] = NOT_APPLICABLE if gflops is None else gflops
    for name in ("cosine_mean", "cosine_worst"):
        value = row.value("moves", name)
        absent = "moves" not in row.metrics and row.status not in ("wrong", "unsupported")
        results[name] = NOT_APPLICABLE if absent else row.word("moves").partition(" (")[0] if value is None else value
    for metric, numbers in plugin_metrics([row]).items():
        for name in numbers:
            put(f"{metric}_{name}", metric, row.value(metric, name))
    return results


def as_csv(rows: Sequence[Row]) -> str:
    """All rows in one CSV with one header; fields that a row lacks say `n/a`."""
    flats = [flat(row) for row in rows]
    header = list(dict.fromkeys(key for row in flats for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[row.get(key, NOT_APPLICABLE) for key in header] for row in flats])
    return out.getvalue()
