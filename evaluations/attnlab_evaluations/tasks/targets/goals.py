"""A goal, its verdict, and how both sides of a ratio are timed on the same inputs. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnlab_evaluations.measure.timing import LEVEL, MAX_ROUNDS, Interval, measure

UNMEASURED = Interval(math.nan, math.nan, math.nan)
NO_TIME = "no time left; give more --budget"


@dataclass(frozen=True)
class Target:
    """One goal: what was measured, the peer, the measured interval, its unit, and the most it may be (None: no goal)."""

    what: str
    peer: str
    ratio: Interval
    unit: str
    goal: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `within noise`, `too few rounds`, `not measured` or `no goal`."""
        if math.isnan(self.ratio.median):
            return "not measured"
        if self.goal is None:
            return "no goal"
        if self.ratio.level < LEVEL:
            return "too few rounds"
        if self.ratio.high <= self.goal:
            return "met"
        return "missed" if self.ratio.low > self.goal else "within noise"


def time_pair(
    ours: Callable[[], object], theirs: Callable[[], object], budget: float, seed: int
) -> tuple[list[float], list[float]] | None:
    """Seconds of both, paired by round; None where there was no time."""
    for call in (ours, theirs):
        call()  # imports and first instances belong to no round
    samples = time_calls({"theirs": theirs, "ours": ours}, "theirs", budget, seed, max_rounds=200)
    return (samples["ours"], samples["theirs"]) if len(samples) == 2 else None


def time_calls(
    calls: dict[str, Callable[[], object]], reference: str, budget: float, seed: int, max_rounds: int = MAX_ROUNDS
) -> dict[str, list[float]]:
    """Each call's seconds in round order, without those there was no time for. A call that raises is raised again."""
    result = measure(calls, reference=reference, always=list(calls), budget=budget, seed=seed, max_rounds=max_rounds)
    if result.failed:
        raise next(iter(result.failed.values()))
    return result.samples


def random_inputs(heads: int, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, heads, length, width, generator=generator) for _ in range(3))
    return query, key, value
