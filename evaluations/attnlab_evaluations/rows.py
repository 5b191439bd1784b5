"""From records to table rows: one row a variant and problem, each metric a value or a status word.

Needs only the standard library. Nothing is blank: what has no number says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab_evaluations.timing import Interval, bootstrap_median, exponent

PHASES = ("forward", "forward_backward")
NULL = "dot_product again"
"""The null control: the reference once more, under another name."""
MISSING = "not measured"


@dataclass
class Row:
    """One line of a table: where it belongs, its status word and reason, its metrics' records."""

    workload: str
    variant: str
    coordinates: dict[str, Any]
    status: str
    reason: str = ""
    known: tuple[str, ...] = ()
    metrics: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    exponents: dict[str, float | None] = field(default_factory=dict)

    def value(self, metric: str, name: str) -> Any:
        """One number of a metric, None where it has none."""
        record = self.metrics.get(metric)
        found = record.get("value") if record and record["status"] in ("ok", "not trained") else None
        return None if found is None else found.get(name)

    def word(self, metric: str) -> str:
        """Why a metric has no number: its status word and reason."""
        record = self.metrics.get(metric)
        if record is None:
            return self.status if self.status in ("wrong", "unsupported") else MISSING
        if self.status in ("wrong", "unsupported"):
            return self.status  # its reason stands in the status column
        if record["status"] in ("ok", "not trained"):
            return "not finite"  # it ran, and gave NaN or Inf
        return str(record["status"]) + (f" ({record['detail']})" if record.get("detail") else "")


@dataclass(frozen=True)
class Null:
    """The null control of a run: per group, and pooled over all groups."""

    groups: Mapping[tuple[Any, ...], Interval]
    pooled: Interval | None

    @property
    def quiet(self) -> bool:
        """Whether ratios of this run may be read as wins: the pooled interval includes 1."""
        return self.pooled is not None and self.pooled.contains(1.0)

    def sentence(self) -> str:
        """What to print about it."""
        if self.pooled is None:
            return "null control: not measured, so no wins are claimed"
        text = f"{self.pooled.median:.3f} [{self.pooled.low:.3f}, {self.pooled.high:.3f}]"
        if self.quiet:
            return f"null control (dot_product against itself): {text}, includes 1"
        return (
            f"machine too noisy: dot_product against itself is {text}, which excludes 1; no wins are claimed"
        )


def group_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was timed together: workload, coordinates and phase."""
    return (
        record["workload"],
        *sorted((k, str(v)) for k, v in record["coordinates"].items()),
        record["metric"],
    )


def null_control(records: Iterable[Mapping[str, Any]]) -> Null:
    """The null control's intervals, from the records of the reference timed against itself."""
    groups: dict[tuple[Any, ...], Interval] = {}
    pooled: list[float] = []
    for record in records:
        if record.get("variant") == NULL and record["status"] == "ok":
            ratio = record["value"]["ratio"]
            groups[group_of(record)] = Interval(ratio["median"], ratio["low"], ratio["high"])
            pooled += [
                math.log(a / b) for a, b in zip(record["samples"], record["reference_samples"], strict=True)
            ]
    if not pooled:
        return Null(groups, None)
    found = bootstrap_median(pooled)
    return Null(groups, Interval(math.exp(found.median), math.exp(found.low), math.exp(found.high)))


def verdict(row: Row, phase: str, null: Null) -> str:
    """`faster`, `slower` or `same`, beyond the null control's floor; "" where nothing is claimed."""
    record = row.metrics.get(phase)
    ratio = row.value(phase, "ratio")
    if record is None or not ratio or not null.quiet:
        return ""
    floor_of = null.groups.get(group_of(record))
    if floor_of is None:
        return ""
    floor = max(floor_of.high, 1 / floor_of.low)
    if ratio["high"] < 1 / floor:
        return "faster"
    return "slower" if ratio["low"] > floor else "same"


def build(records: Iterable[Mapping[str, Any]], variants: Sequence[str]) -> list[Row]:
    """The rows of a run in table order: workload, coordinates, then `variants` as given."""
    cells = [r for r in records if r.get("variant") != NULL]
    gate = {r["variant"]: r for r in cells if r["metric"] == "conformance"}
    places: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in cells:
        if record["metric"] == "conformance":
            continue
        place = (record["workload"], *sorted((k, str(v)) for k, v in record["coordinates"].items()))
        places.setdefault(place, (record["workload"], dict(record["coordinates"])))
        found.setdefault((place, record["variant"]), {})[record["metric"]] = record
    rows: list[Row] = []
    for place, (workload, coordinates) in sorted(places.items(), key=_order):
        for variant in variants:
            metrics = found.get((place, variant), {})
            status, reason, known = _status(gate.get(variant), metrics)
            rows.append(Row(workload, variant, coordinates, status, reason, known, metrics))
    _fill_exponents(rows)
    return rows


def _order(item: tuple[tuple[Any, ...], tuple[str, dict[str, Any]]]) -> tuple[Any, ...]:
    workload, coordinates = item[1]
    return (workload, str(coordinates.get("causal", "")), coordinates.get("length", 0), item[0])


def _status(
    gate: Mapping[str, Any] | None, metrics: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str, tuple[str, ...]]:
    if gate is not None and gate["status"] != "ok":
        return str(gate["status"]), str(gate.get("detail", "")), ()
    known = tuple(gate["value"].get("known", ())) if gate is not None else ()
    if metrics and all(m["status"] == "unsupported" for m in metrics.values()):
        return "unsupported", str(next(iter(metrics.values())).get("detail", "")), known
    if any(m.get("untrained") for m in metrics.values()):
        return "not trained", "", known
    return "ok", "", known


def _fill_exponents(rows: Sequence[Row]) -> None:
    """The time exponent of each variant over the longest lengths, written into all its rows."""
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "length" in row.coordinates:
            other = tuple(sorted((k, str(v)) for k, v in row.coordinates.items() if k != "length"))
            series.setdefault((row.workload, row.variant, other), []).append(row)
    for members in series.values():
        for phase in PHASES:
            points = [(r.coordinates["length"], r.value(phase, "median")) for r in members]
            known = [(length, seconds) for length, seconds in points if seconds]
            # Two points always lie on a line: they say nothing about how well a power law fits.
            slope = exponent([n for n, _ in known], [s for _, s in known]) if len(known) > 2 else None
            for row in members:
                row.exponents[phase] = slope
