"""Estimates of the seconds and bytes of a cell, before it is tried. Needs torch through its inputs only.

Measurements at shorter lengths come first; before there are any, the formula's operations and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlab_evaluations.measure import costs, memory
from attnlab_evaluations.tasks.compare.problems import Calls, Part, Problem
from attnlab_evaluations.tasks.compare.rows import PHASES

SPECIAL_PER_SECOND = 4e9
"""More exponentials or reciprocals a second than a machine does: for what surely cannot fit."""


@dataclass
class Estimates:
    """Remembers what was measured, by variant and problem without its length, and extrapolates.

    `peak_gflops` is the machine's matrix product rate; `free` tells the bytes that are free on a device.
    """

    peak_gflops: float
    device: str = "cpu"
    free: Callable[[str], int | None] = memory.free_bytes
    _seen: dict[tuple[Any, ...], dict[int, float]] = field(default_factory=dict)

    def learn(self, problem: Problem, name: str, metric: str, record: Mapping[str, Any]) -> None:
        """Take in a finished time or memory cell."""
        if record["status"] != "ok":
            return
        if metric in PHASES:
            self._seen.setdefault(_series(problem, name, metric), {})[problem.length] = record["value"]["median"]
        elif metric.startswith("memory_"):
            self._seen.setdefault(_series(problem, name, metric), {})[problem.length] = record["value"]["bytes"]

    def refusal(
        self, problem: Problem, phase: str, name: str, calls: Calls, *, beside: float = 0
    ) -> tuple[str, str] | None:
        """`(status, detail)` where memory would not do, or the backward is not declared; else None.

        `beside` are bytes that will be taken before the call and are not yet.
        """
        if phase != PHASES[0] and any(part.past for part in calls.parts):
            return "unsupported", "a step of decoding has no backward pass here"
        if phase != PHASES[0]:
            reasons = calls.instances[0].supports(calls.parts[0].request(calls.instances[0], backward=True))
            if reasons:
                return "unsupported", "; ".join(map(str, reasons))
        return self.lacking(self.extra_bytes(problem, phase, name, calls) + beside)

    def lacking(self, need: float, what: str = "needs", device: str | None = None) -> tuple[str, str] | None:
        """`("out of memory", detail)` where `need` bytes are more than are free on the device; else None."""
        room = self.free(self.device if device is None else device)
        if room is None or need <= room:
            return None
        return "out of memory", f"{what} about {gibibytes(need)}, {gibibytes(room)} are free"

    def extra_bytes(self, problem: Problem, phase: str, name: str, calls: Calls) -> float:
        """The bytes that one call takes beyond its inputs."""
        linear = calls.instances[0].capabilities.linear_memory
        known = costs.extrapolate(
            self._seen.get(_series(problem, name, f"memory_{phase}"), {}),
            problem.length,
            default=1.0 if linear else 2.0,
        )
        if known:
            return known
        guesses = [
            costs.memory_estimate(**sizes(p), linear_memory=linear, backward=phase != PHASES[0]) for p in calls.parts
        ]
        return float(max(guesses, default=0))

    def seconds(self, problem: Problem, phase: str, name: str, calls: Calls | None) -> float:
        """Seconds a call: from shorter lengths, else from the forward, else the least; 0: unknown."""
        known = costs.extrapolate(
            self._seen.get(_series(problem, name, phase), {}), problem.length, default=growth(calls)
        )
        if known:
            return known
        forward = self._seen.get(_series(problem, name, PHASES[0]), {}).get(problem.length)
        if phase != PHASES[0] and forward:
            return forward * (1 + costs.BACKWARD_FACTOR)
        cost = operations(calls, phase) if calls is not None else None
        return 0.0 if cost is None else cost[0] / (self.peak_gflops * 1e9) + cost[1] / SPECIAL_PER_SECOND


def gibibytes(count: float) -> str:
    """Bytes for people: `0.5 GiB`, `76.3 GiB`, `12,288 GiB`."""
    size = count / 2**30
    return f"{size:.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"


def growth(calls: Calls | None) -> float:
    """The slope in length of the formula's operations, 2 where it is not known: it spans a single measured point."""
    parts = calls.parts if calls is not None else ()
    if calls is None or not parts:
        return 2.0
    at: dict[str, Any] = {**sizes(parts[0]), "causal": parts[0].causal, "options": calls.instances[0].options}
    half = {**at, **{word: max(1, at[word] // 2) for word in ("query_length", "key_length")}}
    whole = costs.forward_cost(calls.instances[0].formula, **at)
    less = costs.forward_cost(calls.instances[0].formula, **half)
    if whole is None or less is None or not less.flops or at["query_length"] < 2:
        return 2.0
    return math.log(whole.flops / less.flops) / math.log(2)


def operations(calls: Calls, phase: str) -> tuple[float, float] | None:
    """FLOPs and special functions of one call of all parts; None where the formula's are not known."""
    flops = special = 0.0
    for part, instance in zip(calls.parts, calls.instances, strict=True):
        result = costs.forward_cost(
            instance.formula, **sizes(part), pairs=part.pairs, causal=part.causal, options=instance.options
        )
        if result is None:
            return None
        factor = 1.0 if phase == PHASES[0] else 1 + costs.BACKWARD_FACTOR
        flops, special = flops + factor * result.flops, special + factor * result.special
    return flops, special


def sizes(part: Part) -> dict[str, int]:
    """The part's sizes in the words of `attnlab_evaluations.measure.costs`."""
    batch, heads, n_q, _ = part.query.shape
    return {
        "batch": batch,
        "num_heads": heads,
        "query_length": n_q,
        "key_length": part.key.shape[2],
        "key_dim": part.key.shape[3],
        "value_dim": part.value.shape[3],
        "itemsize": part.query.element_size(),
    }


def _series(problem: Problem, name: str, metric: str) -> tuple[Any, ...]:
    return (name, *(f"{k}={v}" for k, v in problem.coordinates.items() if k != "length"), metric)
