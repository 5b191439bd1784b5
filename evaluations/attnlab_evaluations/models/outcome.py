"""What a cell of the matrix holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, WORKS, FORWARD, REFUSED, WRONG = "equal", "works", "forward", "refused", "WRONG"


@dataclass(frozen=True)
class Cell:
    """What was found; `note` is the reason where there is one, `error` the largest relative difference where equality was asked."""

    model: str
    variant: str
    status: str
    note: str = ""
    error: float | None = None
