"""How every memory of the capacity task is trained: one recipe for all variants. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Schlag et al. 2021, section 6.1, scaled down in width and steps (there 64, and 100 000).

    width of keys and queries; at most max_steps of `batch` new sequences each, by Adam with `learning_rate`. Every `every` steps
    `evaluated` fresh sequences are asked: training ends where their loss is at most `solved`, or was no better than before
    `patience` times in a row.
    """

    width: int = 16
    max_steps: int = 3000
    batch: int = 32
    learning_rate: float = 1e-3
    every: int = 100
    evaluated: int = 64
    patience: int = 10
    solved: float = 1e-3
