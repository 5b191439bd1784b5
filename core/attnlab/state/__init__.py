"""What a variant keeps between calls: a cache of keys and values, a bounded window of them, or the sums of a recurrence. Needs torch."""

from __future__ import annotations

from attnlab.state.states import CacheState, LinearState, ProjectedState, RecurrentState, State
from attnlab.state.window import WindowState

__all__ = ["CacheState", "LinearState", "ProjectedState", "RecurrentState", "State", "WindowState"]
