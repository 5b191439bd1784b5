"""Tables of a run for the terminal, Markdown, CSV and JSON, from rows. Needs tabulate.

A cell holds a number, or a status word with its reason; never nothing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from attnlab_evaluations.rows import PHASES, Null, Row, verdict
from attnlab_evaluations.settings import REFERENCE

LEGEND = (
    "times: median milliseconds [95% interval]; ratio: to dot_product, paired by round [95% interval]; "
    "~ spread over 10% of the median or under 6 rounds; extra: peak MiB beyond the inputs; "
    "error: largest difference from the float64 definition; exponent: slope of log forward time in log length"
)
NOT_APPLICABLE = "n/a"
_NUMBERS = ("median", "low", "high")


def milliseconds(seconds: float) -> str:
    """Three digits: `0.123`, `1.23`, `12.3`, `123`, `1234`."""
    value = seconds * 1e3
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _time(row: Row, phase: str) -> str:
    median, low, high = (row.value(phase, n) for n in _NUMBERS)
    if median is None:
        return row.word(phase)
    mark = "~" if row.value(phase, "noisy") else ""
    return f"{milliseconds(median)} [{milliseconds(low)}, {milliseconds(high)}]{mark}"


def _ratio(row: Row, phase: str, null: Null) -> str:
    ratio = row.value(phase, "ratio")
    if ratio is None:
        return row.word(phase).partition(" (")[0] if row.value(phase, "median") is None else "no reference"
    if row.variant == REFERENCE:
        return "reference"
    said = verdict(row, phase, null)
    return f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]" + (f" {said}" if said else "")


def _extra(row: Row, phase: str) -> str:
    extra = row.value(f"memory_{phase}", "bytes")
    return row.word(f"memory_{phase}") if extra is None else f"{extra / 2**20:.1f}"


def _error(row: Row) -> str:
    error = row.value("error", "worst")
    return row.word("error") if error is None else f"{error:.1e}"


def _cosine(row: Row, which: str) -> str:
    cosine = row.value("moves", which)
    return row.word("moves") if cosine is None else f"{cosine:.6f}"


def _exponent(row: Row, phase: str) -> str:
    slope = row.exponents.get(phase)
    return NOT_APPLICABLE if slope is None else f"{slope:.2f}"


def status_text(row: Row) -> str:
    """The status word with its reason, and a dagger with the checks that are known to fail."""
    text = f"{row.status}: {row.reason}" if row.reason else row.status
    return f"{text} † {', '.join(row.known)}" if row.known else text


def columns(rows: Sequence[Row], null: Null) -> list[tuple[str, Callable[[Row], str]]]:
    """The columns that these rows of one workload have in common, as (header, cell)."""
    made: list[tuple[str, Callable[[Row], str]]] = [("variant", lambda r: r.variant)]
    for name in dict.fromkeys(n for row in rows for n in row.coordinates):
        made.append((name, lambda r, n=name: _plain(r.coordinates.get(n, NOT_APPLICABLE))))  # type: ignore[misc]
    made += [("status", status_text), ("error", _error)]
    for phase, short in zip(PHASES, ("forward", "fwd+bwd"), strict=True):
        made.append((f"{short} ms", lambda r, p=phase: _time(r, p)))  # type: ignore[misc]
        made.append((f"{short} ratio", lambda r, p=phase: _ratio(r, p, null)))  # type: ignore[misc]
    for phase, short in zip(PHASES, ("extra fwd", "extra fwd+bwd"), strict=True):
        made.append((f"{short} MiB", lambda r, p=phase: _extra(r, p)))  # type: ignore[misc]
    if any("length" in row.coordinates for row in rows):
        made.append(("exponent", lambda r: _exponent(r, "forward")))
    if any("moves" in row.metrics for row in rows):
        made.append(("cosine mean", lambda r: _cosine(r, "cosine_mean")))
        made.append(("cosine worst", lambda r: _cosine(r, "cosine_worst")))
    return made


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _of_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    parted: dict[str, list[Row]] = {}
    for row in rows:
        parted.setdefault(row.workload, []).append(row)
    return parted


def terminal(rows: Sequence[Row], null: Null, notes: Sequence[str] = ()) -> str:
    """One table a workload; long reasons wrap inside their cell."""
    parts = []
    for workload, members in _of_workload(rows).items():
        cols = columns(members, null)
        body = [[cell(row) for _, cell in cols] for row in members]
        widths = [36 if header == "status" else 26 for header, _ in cols]
        table = tabulate(
            body, headers=[h for h, _ in cols], tablefmt="simple", disable_numparse=True, maxcolwidths=widths
        )
        parts.append(f"{workload}\n{table}")
    return "\n\n".join([*parts, "\n".join([null.sentence(), LEGEND, *notes])]) + "\n"


def markdown(rows: Sequence[Row], null: Null, notes: Sequence[str] = ()) -> str:
    """The same tables in GitHub's Markdown, reasons in full."""
    parts = ["# attnlab compare"]
    for workload, members in _of_workload(rows).items():
        cols = columns(members, null)
        body = [[cell(row).replace("|", "\\|").replace("\n", " ") for _, cell in cols] for row in members]
        table = tabulate(body, headers=[h for h, _ in cols], tablefmt="github", disable_numparse=True)
        parts.append(f"## {workload}\n\n{table}")
    return "\n\n".join([*parts, *(f"{line}" for line in (null.sentence(), LEGEND, *notes))]) + "\n"


def flat(row: Row, null: Null) -> dict[str, Any]:
    """One row as plain fields: numbers where there are numbers, otherwise the status word."""
    found: dict[str, Any] = {"workload": row.workload, "variant": row.variant}
    for name in ("length", "causal", "layers"):
        found[name] = row.coordinates.get(name, NOT_APPLICABLE)
    found.update({n: v for n, v in row.coordinates.items() if n not in found})
    found["status"] = row.status
    found["reason"] = row.reason or NOT_APPLICABLE
    found["known_failures"] = ", ".join(row.known) or "none"

    def put(key: str, metric: str, value: Any) -> None:
        found[key] = row.word(metric).partition(" (")[0] if value is None else value

    put("error", "error", row.value("error", "worst"))
    for phase in PHASES:
        for name in _NUMBERS:
            put(f"{phase}_seconds_{name}", phase, row.value(phase, name))
        ratio = row.value(phase, "ratio") or {}
        for name in _NUMBERS:
            missing = row.value(phase, "median") is not None and not ratio
            put(f"{phase}_ratio_{name}", phase, "no reference" if missing else ratio.get(name))
        put(f"{phase}_rounds", phase, row.value(phase, "rounds"))
        put(f"{phase}_noisy", phase, row.value(phase, "noisy"))
        found[f"{phase}_verdict"] = verdict(row, phase, null) or "none claimed"
        put(f"{phase}_extra_bytes", f"memory_{phase}", row.value(f"memory_{phase}", "bytes"))
        slope = row.exponents.get(phase)
        found[f"{phase}_exponent"] = NOT_APPLICABLE if slope is None else slope
    gflops = row.value("forward", "gflops")
    found["forward_gflops"] = NOT_APPLICABLE if gflops is None else gflops
    for name in ("cosine_mean", "cosine_worst"):
        value = row.value("moves", name)
        absent = "moves" not in row.metrics and row.status not in ("wrong", "unsupported")
        found[name] = (
            NOT_APPLICABLE if absent else row.word("moves").partition(" (")[0] if value is None else value
        )
    return found


def as_csv(rows: Sequence[Row], null: Null) -> str:
    """All rows in one CSV with one header; fields that a row lacks say `n/a`."""
    flats = [flat(row, null) for row in rows]
    header = list(dict.fromkeys(key for row in flats for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([[row.get(key, NOT_APPLICABLE) for key in header] for row in flats])
    return out.getvalue()
