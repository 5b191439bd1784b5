"""Paired, interleaved timing with intervals. Needs only the standard library; callers bring the operations.

Every round runs every operation once, in a new random order, so slow drifts of the machine hit all
alike; ratios are taken within a round. Times are seconds per call.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

HALF_WIDTH = 0.02
"""Stop when the 95% interval of every median ratio reaches at most this far from it (2%)."""
NOISY_SPREAD = 0.10
"""A cell whose interquartile range exceeds this share of its median is flagged."""
MIN_ROUNDS = 3
FEW_ROUNDS = 6
"""The range of n draws covers the median with chance `1 - 2^(1-n)`: 95% needs at least six rounds."""
MAX_ROUNDS = 40
SAMPLE_SECONDS = 0.002
"""An operation shorter than this is repeated within a sample, far above the clock's own cost."""


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether `value` lies in the interval, ends included."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Summary:
    """One operation's samples in numbers: seconds a call, its spread, and whether to trust it."""

    interval: Interval
    spread: float
    rounds: int
    noisy: bool


@dataclass
class Measurement:
    """What `measure` saw: samples per operation in round order, and those left out with the reason.

    `warm` holds the seconds of each warm-up call, `over_budget` those a call would take; `failed` to the exception it raised.
    `stopped` is `"converged"`, `"budget"` or `"rounds"`.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)
    over_budget: dict[str, float] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    stopped: str = "budget"


def bootstrap_median(
    values: Sequence[float], *, seed: int = 0, resamples: int = 1000, level: float = 0.95
) -> Interval:
    """The median of `values` and its percentile bootstrap interval; `values` must not be empty."""
    rng = random.Random(seed)
    n = len(values)
    medians = sorted(statistics.median(rng.choices(values, k=n)) for _ in range(resamples))
    tail = (1 - level) / 2
    low = medians[math.floor(tail * (resamples - 1))]
    high = medians[math.ceil((1 - tail) * (resamples - 1))]
    return Interval(statistics.median(values), low, high)


def paired_ratio(values: Sequence[float], reference: Sequence[float], *, seed: int = 0) -> Interval:
    """`values / reference`, paired by round: the median log ratio and its interval, as plain ratios."""
    logs = [math.log(v / r) for v, r in zip(values, reference, strict=True)]
    found = bootstrap_median(logs, seed=seed)
    return Interval(math.exp(found.median), math.exp(found.low), math.exp(found.high))


def summarise(values: Sequence[float], *, seed: int = 0) -> Summary:
    """Median with interval, and the flag: spread over 10% of the median, or too few rounds for 95%."""
    interval = bootstrap_median(values, seed=seed)
    if len(values) < 2:
        return Summary(interval, math.inf, len(values), True)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    spread = (third - first) / interval.median if interval.median > 0 else math.inf
    return Summary(interval, spread, len(values), spread > NOISY_SPREAD or len(values) < FEW_ROUNDS)


def choose(
    expected: Mapping[str, float], *, always: Sequence[str], budget: float, calls: int = MIN_ROUNDS
) -> list[str]:
    """The names that fit: those in `always` first, then the cheapest, at `calls` calls each.

    `expected` holds seconds a call (0 where unknown). Cheapest first fills the most cells.
    """
    order = [*always, *sorted((n for n in expected if n not in always), key=lambda n: expected[n])]
    kept: list[str] = []
    spent = 0.0
    for name in order:
        spent += calls * expected[name]
        if spent > budget:
            break
        kept.append(name)
    return kept


def measure(
    operations: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    always: Sequence[str] = (),
    budget: float,
    seed: int,
    expected: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = lambda: None,
    max_rounds: int = MAX_ROUNDS,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Measurement:
    """Time `operations` side by side for about `budget` seconds.

    `reference` (and `always`) are measured first and never dropped for another's sake; where even they do
    not fit, everything is over budget. `synchronize` runs before both readings of the clock. `expected`
    holds seconds a call where something is known already; what cannot fit is never started.
    """
    result = Measurement()
    first = [reference, *(n for n in always if n != reference)]
    known = {name: (expected or {}).get(name, 0.0) for name in operations}
    # An estimate may be far off (a busy machine, a slope that bends): what one call can settle is tried.
    kept = choose(known, always=first, budget=budget / 2, calls=1)
    result.over_budget = {name: known[name] for name in operations if name not in kept}
    if reference not in kept:
        return result

    def sample(name: str, repeats: int) -> float:
        synchronize()
        start = clock()
        for _ in range(repeats):
            operations[name]()
        synchronize()
        return (clock() - start) / repeats

    warm = result.warm
    for name in kept:
        try:
            warm[name] = sample(name, 1)
            if warm[name] < max(
                0.1, budget / 10
            ):  # a first call can carry one-time costs; a second one tells
                warm[name] = min(warm[name], sample(name, 1))
        except Exception as error:  # the caller turns it into a status word
            result.failed[name] = error
    if reference not in warm:
        return result
    # One-time costs of the first calls are not held against the rounds: those get the whole budget.
    deadline = clock() + budget
    fits = choose(warm, always=[n for n in first if n in warm], budget=budget)
    result.over_budget.update({name: warm[name] for name in warm if name not in fits})
    if reference not in fits:
        return result
    repeats = {name: max(1, math.ceil(sample_seconds / max(warm[name], 1e-9))) for name in fits}
    result.samples = {name: [] for name in fits}
    rng = random.Random(seed)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        _rounds(result, fits, repeats, sample, reference, rng, clock, deadline, max_rounds)
    finally:
        if collecting:
            gc.enable()
    return result


def _rounds(
    result: Measurement,
    names: list[str],
    repeats: Mapping[str, int],
    sample: Callable[[str, int], float],
    reference: str,
    rng: random.Random,
    clock: Callable[[], float],
    deadline: float,
    max_rounds: int,
) -> None:
    """Run rounds until every ratio is narrow, the deadline is near, or `max_rounds`. Samples stay paired."""
    longest = 0.0
    for done in range(max_rounds):
        began = clock()
        if done >= MIN_ROUNDS and began + longest > deadline:
            result.stopped = "budget"
            return
        order = list(names)
        rng.shuffle(order)
        seen: dict[str, float] = {}
        for name in order:
            try:
                seen[name] = sample(name, repeats[name])
            except Exception as error:
                result.failed[name] = error
        for name in list(names):
            if name in seen:
                result.samples[name].append(seen[name])
            else:  # it failed in this round: its earlier samples go too, a failing cell has no numbers
                names.remove(name)
                del result.samples[name]
        if reference not in names:
            result.samples.clear()
            return
        longest = max(longest, clock() - began)
        if done + 1 >= FEW_ROUNDS and (done + 1) % 2 == 0 and _converged(result.samples, reference):
            result.stopped = "converged"
            return
    result.stopped = "rounds"


def _converged(samples: Mapping[str, Sequence[float]], reference: str) -> bool:
    """Whether each paired log ratio's interval is within `HALF_WIDTH` of its median."""
    for name, values in samples.items():
        if name == reference:
            continue
        logs = [math.log(v / r) for v, r in zip(values, samples[reference], strict=True)]
        found = bootstrap_median(logs, resamples=200)
        if max(found.high - found.median, found.median - found.low) > HALF_WIDTH:
            return False
    return True


def exponent(lengths: Sequence[int], seconds: Sequence[float], *, last: int = 3) -> float | None:
    """The slope of log time over log length by least squares over the `last` longest; None below two."""
    points = sorted(zip(lengths, seconds, strict=True))[-last:]
    if len(points) < 2:
        return None
    xs = [math.log(length) for length, _ in points]
    ys = [math.log(second) for _, second in points]
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    below = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / below if below else None
