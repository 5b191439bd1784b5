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

LEVEL = 0.95
HALF_WIDTH = 0.02
"""Stop when the 95% interval of every median ratio reaches at most this far from it (2%), and where the ratio is"""
NEAR = 0.05
"""this close to 1, so that its word hangs on little, at most"""
HALF_WIDTH_NEAR = 0.005
"""so far."""
NOISY_SPREAD = 0.10
"""A cell whose interquartile range exceeds this share of its median is flagged."""
MIN_ROUNDS = 12
"""Rounds that a cell gets at least; one that does not fit so many is left out, and says so."""
MAX_ROUNDS = 60
RESAMPLES = 1000
SAMPLE_SECONDS = 0.002
"""An operation shorter than this is repeated within a sample, far above the clock's own cost."""


@dataclass(frozen=True)
class Interval:
    """A median and its interval, which covers the true median with probability `level`."""

    median: float
    low: float
    high: float
    level: float = LEVEL

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

    `first` holds the seconds of each first call, one-time costs and all, `warm` those of the second, `over_budget` those
    a call would take, `failed` the exception it raised.
    `stopped` is `"converged"`, `"budget"` or `"rounds"`.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)
    over_budget: dict[str, float] = field(default_factory=dict)
    failed: dict[str, Exception] = field(default_factory=dict)
    stopped: str = "budget"


def median_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """The median of `values`, which must not be empty, and its exact interval from order statistics.

    Whatever the values' distribution, as many of them lie below their true median as heads fall in n throws. The
    interval's own `level` says how sure it is: 95% or more from six values on, less below (75% with three).
    """
    ordered, n = sorted(values), len(values)
    cut, outside = 0, 2 * 0.5**n  # the chance that all lie on one side
    term = 0.5**n
    while 2 * (cut + 1) < n:
        term *= (n - cut) / (cut + 1)
        if outside + 2 * term > 1 - level:
            break
        cut, outside = cut + 1, outside + 2 * term
    return Interval(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut], max(0.0, 1 - outside))


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Interval:
    """`values / reference`, paired by round: the median log ratio and its interval, as plain ratios."""
    result = median_interval([math.log(v / r) for v, r in zip(values, reference, strict=True)])
    return Interval(math.exp(result.median), math.exp(result.low), math.exp(result.high), result.level)


def summarise(values: Sequence[float]) -> Summary:
    """Median with interval, and the flag: spread over 10% of the median, or too few rounds for 95%."""
    interval = median_interval(values)
    if len(values) < 2:
        return Summary(interval, math.inf, len(values), True)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    spread = (third - first) / interval.median if interval.median > 0 else math.inf
    return Summary(interval, spread, len(values), spread > NOISY_SPREAD or interval.level < LEVEL)


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
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Measurement:
    """Time `operations` side by side for about `budget` seconds.

    `reference` (and `always`) are measured first and never dropped for another's sake; where even they do
    not fit, everything is over budget. `synchronize` runs before both readings of the clock. `expected`
    holds seconds a call where something is known already; what cannot fit is never started. What fits gets
    `min_rounds` rounds at least, so that a small budget measures fewer operations well.
    """
    min_rounds = min(min_rounds, max_rounds)
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
            result.first[name] = sample(name, 1)
            warm[name] = sample(name, 1)  # the first can carry one-time costs, whatever it took
        except Exception as error:  # the caller turns it into a status word
            result.failed[name] = error
    if reference not in warm:
        return result
    # One-time costs of the first calls are not held against the rounds: those get the whole budget.
    deadline = clock() + budget
    fits = choose(warm, always=[n for n in first if n in warm], budget=budget, calls=min_rounds)
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
        _rounds(result, fits, repeats, sample, reference, rng, clock, deadline, (min_rounds, max_rounds))
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
    rounds: tuple[int, int],
) -> None:
    """Run rounds, so many at least and at most, until every ratio is narrow or the deadline is near. Samples stay paired."""
    longest = 0.0
    for done in range(rounds[1]):
        began = clock()
        if done >= rounds[0] and began + longest > deadline:
            result.stopped = "budget"
            return
        order = list(names)
        rng.shuffle(order)
        earlier: dict[str, float] = {}
        for name in order:
            try:
                earlier[name] = sample(name, repeats[name])
            except Exception as error:
                result.failed[name] = error
        for name in list(names):
            if name in earlier:
                result.samples[name].append(earlier[name])
            else:  # it failed in this round: its earlier samples go too, a failing cell has no numbers
                names.remove(name)
                del result.samples[name]
        if reference not in names:
            result.samples.clear()
            return
        longest = max(longest, clock() - began)
        if done + 1 >= rounds[0] and (done + 1) % 2 == 0 and _converged(result.samples, reference):
            result.stopped = "converged"
            return
    result.stopped = "rounds"


def _converged(samples: Mapping[str, Sequence[float]], reference: str) -> bool:
    """Whether each paired log ratio's interval is narrow enough for how near to 1 it lies."""
    for name, values in samples.items():
        if name == reference:
            continue
        logs = [math.log(v / r) for v, r in zip(values, samples[reference], strict=True)]
        result = median_interval(logs)
        enough = HALF_WIDTH_NEAR if abs(result.median) < NEAR else HALF_WIDTH
        if max(result.high - result.median, result.median - result.low) > enough:
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


def exponent_interval(
    lengths: Sequence[int], samples: Sequence[Sequence[float]], *, seed: int = 0, last: int = 3
) -> Interval | None:
    """The exponent of `exponent` over medians, with its bootstrap interval over the rounds of each length.

    Its level is 95% where every length has 12 rounds, as a bootstrap of medians needs, and unknown (0) below.
    """
    chosen = sorted(zip(lengths, samples, strict=True))[-last:]
    known = [length for length, _ in chosen]
    slope = exponent(known, [statistics.median(values) for _, values in chosen], last=last)
    if slope is None:
        return None
    rng = random.Random(seed)
    drawn = []
    for _ in range(RESAMPLES):
        medians = [statistics.median(rng.choices(values, k=len(values))) for _, values in chosen]
        drawn.append(exponent(known, medians, last=last) or slope)
    drawn.sort()
    tail = round((1 - LEVEL) / 2 * RESAMPLES)
    enough = min(len(values) for _, values in chosen) >= MIN_ROUNDS
    return Interval(slope, drawn[tail], drawn[-1 - tail], LEVEL if enough else 0.0)
