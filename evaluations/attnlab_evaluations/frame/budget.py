"""Sharing a run's seconds among its timing groups. Needs only the standard library."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

TIMED = 0.7
"""The part of the time that goes to timing; errors, memory and set-up take the rest."""
LEAST = 0.3
"""Seconds below which no group's share falls while there is time at all."""


class Budget:
    """Seconds for groups of different weight: what one group leaves over, the later ones get."""

    def __init__(
        self, seconds: float, weights: Mapping[Hashable, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._weights = dict(weights)

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._end - self._clock())

    def take(self, group: Hashable) -> float:
        """The seconds that `group` may time for; its weight (0 where it has none) leaves the pool."""
        total = sum(self._weights.values())
        weight = self._weights.pop(group, 0.0)
        share = TIMED * self.left * weight / total if total > 0 else 0.0
        return max(share, min(LEAST, self.left))

    def skip(self, group: Hashable) -> None:
        """`group` needs nothing (it was finished before)."""
        self._weights.pop(group, None)
