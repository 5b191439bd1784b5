"""From records to table rows: one row a variant and problem, each metric a value or a status word.

Needs only the standard library. Nothing is blank: what has no number says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab_evaluations.measure.claims import Group, Null, again, decide, log_ratios, original, pool
from attnlab_evaluations.measure.timing import Interval, exponent_interval
from attnlab_evaluations.tasks.compare.settings import REFERENCE

PHASES = ("forward", "forward_backward")
NULL = again(REFERENCE)
"""The null control that every timed group has: the reference once more, under another name."""
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
    exponents: dict[str, Interval | None] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    reference_is_wrong: bool = False

    def value(self, metric: str, name: str) -> Any:
        """One number of a metric, None where it has none; a wrong variant has none at all."""
        if self.status == "wrong":
            return None
        if self.reference_is_wrong and name == "ratio":
            return None
        record = self.metrics.get(metric)
        result = record.get("value") if record and record["status"] in ("ok", "not trained") else None
        return None if result is None else result.get(name)

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


def group_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was timed together: workload, coordinates and phase."""
    return (record["workload"], *sorted((k, str(v)) for k, v in record["coordinates"].items()), record["metric"])


def null_control(records: Iterable[Mapping[str, Any]]) -> Null:
    """The null controls of a run, from the records of variants that were timed against themselves."""
    ratios: dict[Group, list[list[float]]] = {}
    claims = 0
    for record in records:
        name = str(record.get("variant", ""))
        if record["status"] != "ok" or not record.get("reference_samples"):
            continue
        if name == original(name):
            claims += name != REFERENCE
        else:
            result = log_ratios(record["samples"], record["reference_samples"])
            ratios.setdefault(group_of(record), []).append(result)
    return pool(ratios, claims=claims)


def fill_claims(rows: Sequence[Row], null: Null) -> None:
    """Write a word into every row and phase that has a ratio to the reference: see `claims.decide`."""
    measured: dict[tuple[int, str], tuple[Group, Sequence[float]]] = {}
    for n, row in enumerate(rows):
        for phase in PHASES:
            if row.variant == REFERENCE or not row.value(phase, "ratio"):
                continue
            record = row.metrics[phase]
            ratios = log_ratios(record["samples"], record["reference_samples"])
            measured[n, phase] = (group_of(record), ratios)
    for (n, phase), word in decide(measured, null).items():
        rows[n].claims[phase] = word


def build(records: Iterable[Mapping[str, Any]], variants: Sequence[str]) -> list[Row]:
    """The rows of a run in table order: workload, coordinates, then `variants` as given."""
    cells = [r for r in records if r.get("variant") != NULL]
    conformance = {r["variant"]: r for r in cells if r["metric"] == "conformance"}
    places: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    results: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in cells:
        if record["metric"] == "conformance":
            continue
        place = (record["workload"], *sorted((k, str(v)) for k, v in record["coordinates"].items()))
        places.setdefault(place, (record["workload"], dict(record["coordinates"])))
        results.setdefault((place, record["variant"]), {})[record["metric"]] = record
    rows: list[Row] = []
    for place, (workload, coordinates) in sorted(places.items(), key=_order):
        for variant in variants:
            metrics = results.get((place, variant), {})
            status, reason, known = _status(conformance.get(variant), metrics)
            rows.append(Row(workload, variant, coordinates, status, reason, known, metrics))
        inside = rows[len(rows) - len(variants) :]
        if any(row.variant == REFERENCE and row.status == "wrong" for row in inside):
            for row in inside:
                row.reference_is_wrong = True
    _fill_exponents(rows)
    return rows


def _order(item: tuple[tuple[Any, ...], tuple[str, dict[str, Any]]]) -> tuple[Any, ...]:
    workload, coordinates = item[1]
    return (workload, str(coordinates.get("causal", "")), coordinates.get("length", 0), item[0])


def _status(
    conformance: Mapping[str, Any] | None, metrics: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str, tuple[str, ...]]:
    if conformance is not None and conformance["status"] != "ok":
        return str(conformance["status"]), str(conformance.get("detail", "")), ()
    known = tuple(conformance["value"].get("known", ())) if conformance is not None else ()
    error = metrics.get("error")
    if error is not None and error["status"] == "wrong":
        return "wrong", str(error.get("detail", "")), known
    if metrics and all(m["status"] == "unsupported" for m in metrics.values()):
        return "unsupported", str(next(iter(metrics.values())).get("detail", "")), known
    if any(m.get("untrained") for m in metrics.values()):
        return "not trained", "", known
    return "ok", "", known


def _samples(row: Row, phase: str) -> Sequence[float]:
    result: Sequence[float] = row.metrics[phase].get("samples", ()) if row.value(phase, "median") else ()
    return result


def _fill_exponents(rows: Sequence[Row]) -> None:
    """The time exponent of each variant over the longest lengths, written into all its rows."""
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "length" in row.coordinates:
            other = tuple(sorted((k, str(v)) for k, v in row.coordinates.items() if k != "length"))
            series.setdefault((row.workload, row.variant, other), []).append(row)
    for members in series.values():
        for phase in PHASES:
            points = [(r.coordinates["length"], _samples(r, phase)) for r in members]
            known = [(length, samples) for length, samples in points if samples]
            # Two points always lie on a line: they say nothing about how well a power law fits.
            slope = exponent_interval(*zip(*known, strict=True)) if len(known) > 2 else None
            for row in members:
                row.exponents[phase] = slope
