"""What a table may claim of its ratios: faster, slower, same or not told apart. Needs only the standard library.

The null controls are variants timed against themselves under a second name. They say how far two equal things lie
apart on this machine: a floor below which nothing is claimed, and whether anything is claimed at all.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnlab_evaluations.measure.timing import LEVEL, MIN_ROUNDS, Interval, median_interval

AGAIN = " again"
"""A null control is called after its variant: `dot_product again`."""
FASTER, SLOWER, SAME, OPEN = "faster", "slower", "same", "not told apart"
QUIET = math.log(1.015)
"""The pooled null interval must lie within +-1.5%: equivalence is shown, not a difference missed."""
WIDEST = math.log(1.05)
"""No claim in a group whose own null interval is wider than +-5%."""
LEAST_FLOOR = math.log(1.01)
EQUAL = math.log(1.02)
"""`same` means an interval within +-2%."""
ERROR_RATE = 1 - LEVEL
SPREADS = 3.0
"""Each pair of instances has its own places in memory, which more rounds do not average out: the floor is at least so
many standard deviations of that, and more where a table has so many ratios that one lies further out by chance."""
FEW_CONTROLS = 2.75
"""Standard deviations of a normal variable at whose quantile Student's t is taken where few controls estimate that."""
SPARE_ROUNDS = 2
"""Rounds that may go the other way before a claim fails for lack of rounds."""
RESAMPLES = 1000
NORMAL_MAD = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

Group = tuple[Any, ...]


def again(name: str) -> str:
    """The name of a variant's null control."""
    return name + AGAIN


def original(name: str) -> str:
    """The variant behind a null control's name; any other name is its own."""
    return name.removesuffix(AGAIN)


@dataclass(frozen=True)
class Null:
    """The null controls of a run: log ratios by group, one list for each control of the group."""

    ratios: Mapping[Group, Sequence[Sequence[float]]] = field(default_factory=dict)
    pooled: Interval | None = None
    floor: float = LEAST_FLOOR

    @property
    def quiet(self) -> bool:
        """Whether anything may be claimed: the pooled interval lies within +-1.5%, at a level of 95%."""
        if self.pooled is None or self.pooled.level < LEVEL:
            return False
        return math.log(self.pooled.low) >= -QUIET and math.log(self.pooled.high) <= QUIET

    def usable(self, group: Group) -> bool:
        """Whether claims may be made in the group: it has a null control, and each one's interval is narrow enough."""
        results = [median_interval(ratios) for ratios in self.ratios.get(group, ()) if ratios]
        return bool(results) and all(f.level >= LEVEL and (f.high - f.low) / 2 <= WIDEST for f in results)

    def sentence(self) -> str:
        """What to print about it."""
        if self.pooled is None:
            return "null control: not measured, so nothing is claimed"
        count = sum(len(controls) for controls in self.ratios.values())
        text = f"{self.pooled.median:.3f} [{self.pooled.low:.3f}, {self.pooled.high:.3f}]"
        text += f" over {count} null control{'s' if count != 1 else ''}"
        if self.pooled.level < LEVEL:
            return f"null control: variants against themselves are {text}, from too few rounds: nothing is claimed"
        if self.quiet:
            return (
                f"null control: variants against themselves are {text}, within 1.5%; "
                f"nothing is claimed below {100 * math.expm1(self.floor):.1f}%"
            )
        return f"machine too noisy: variants against themselves are {text}, not within 1.5%; nothing is claimed"


def pool(ratios: Mapping[Group, Sequence[Sequence[float]]], *, claims: int = 1, seed: int = 0) -> Null:
    """The null controls of a run put together, for a table of so many ratios to make claims of.

    The interval comes from drawing groups again, and rounds within them: the samples of one group share a place in
    memory, so that more of them say little more. The floor is the interval's own bound or the spread of single
    controls, whichever is greater, and 1% at least.
    """
    kept = {group: [list(c) for c in controls if c] for group, controls in ratios.items()}
    groups = [controls for controls in kept.values() if controls]
    if not groups:
        return Null()
    rng = random.Random(seed)
    middles = [statistics.median(control) for controls in groups for control in controls]
    drawn = sorted(
        statistics.median(
            statistics.median(rng.choices(control, k=len(control)))
            for controls in rng.choices(groups, k=len(groups))
            for control in controls
        )
        for _ in range(RESAMPLES)
    )
    tail = round(ERROR_RATE / 2 * RESAMPLES)
    low, high = drawn[tail], drawn[-1 - tail]
    least = min(median_interval(control).level for controls in groups for control in controls)
    pooled = Interval(
        math.exp(statistics.median(middles)), math.exp(low), math.exp(high), LEVEL if least >= LEVEL else least
    )
    placement = _placement([control for controls in groups for control in controls], claims)
    return Null(kept, pooled, max(LEAST_FLOOR, abs(low), abs(high), placement))


def _placement(controls: Sequence[Sequence[float]], claims: int) -> float:
    """How far places in memory alone may put two equal things apart, in a table of so many ratios.

    The spread of the controls' middles estimates it, less their rounds' own noise. Few controls may be alike
    by chance, so their spread counts for more: by a quantile of Student's t, approximately, with as many degrees of freedom
    as there are controls.
    """
    spreads = max(SPREADS, statistics.NormalDist().inv_cdf(1 - ERROR_RATE / (2 * max(1, claims))))
    middles = [statistics.median(control) for control in controls]
    whole = (NORMAL_MAD * statistics.median(abs(m) for m in middles)) ** 2
    noise = []
    for control, middle in zip(controls, middles, strict=True):
        deviation = NORMAL_MAD * statistics.median(abs(r - middle) for r in control)
        noise.append(math.pi / 2 * deviation**2 / len(control))  # the variance of a median of so many normal values
    squares = max(spreads**2, len(controls) * math.expm1(FEW_CONTROLS**2 / len(controls)))
    return math.sqrt(max(0.0, squares * whole - spreads**2 * statistics.fmean(noise)))


def chance(ratios: Sequence[float], floor: float) -> tuple[float, str]:
    """How likely log ratios like these are where the true median lies within `floor` of 0, and the side they lie on.

    An exact sign test on both sides: no assumption on how times are distributed.
    """
    above = sum(r > floor for r in ratios)
    below = sum(r < -floor for r in ratios)
    side = SLOWER if above >= below else FASTER
    return min(1.0, 2 * _tail(len(ratios), max(above, below))), side


def _tail(n: int, least: int) -> float:
    """The probability of `least` or more heads in `n` throws."""
    return float(sum(math.comb(n, k) for k in range(least, n + 1)) / 2**n)


def rounds_for(claims: int) -> int:
    """The rounds at which the first of so many claims can be made though two rounds went the other way; 12 at least."""
    n = MIN_ROUNDS
    while 2 * _tail(n, n - SPARE_ROUNDS) > ERROR_RATE / max(1, claims):
        n += 1
    return n


def decide(measured: Mapping[Any, tuple[Group, Sequence[float]]], null: Null) -> dict[Any, str]:
    """A word for each measured ratio: its group and its log ratios by round.

    `faster` and `slower` hold together for the whole table, at most one table in twenty being wrong anywhere: Holm's
    correction over all ratios. `same` where the 95% interval lies within +-2%.
    """
    words = dict.fromkeys(measured, OPEN)
    if not null.quiet:
        return words
    usable = {group for group, _ in measured.values() if null.usable(group)}
    able = {key: ratios for key, (group, ratios) in measured.items() if ratios and group in usable}
    chances = {key: chance(ratios, null.floor) for key, ratios in able.items()}
    for place, key in enumerate(sorted(chances, key=lambda k: chances[k][0])):
        p, side = chances[key]
        if p > ERROR_RATE / (len(chances) - place):
            break
        words[key] = side
    for key, ratios in able.items():
        result = median_interval(ratios)
        within = result.low >= -EQUAL and result.high <= EQUAL
        if words[key] == OPEN and within and result.level >= LEVEL:
            words[key] = SAME
    return words


def log_ratios(values: Iterable[float], reference: Iterable[float]) -> list[float]:
    """Log ratios, paired by round."""
    return [math.log(v / r) for v, r in zip(values, reference, strict=True)]
