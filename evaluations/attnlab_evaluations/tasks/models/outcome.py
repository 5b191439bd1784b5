"""What a cell of the matrix holds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

EQUAL, WORKS, FORWARD, REFUSED, WRONG = "equal", "works", "forward", "refused", "WRONG"


@dataclass(frozen=True)
class Cell:
    """What was found; `note` is the reason where there is one, `error` the largest relative difference where equality was asked.

    packed: whether sequences packed in one row are each answered as if alone; False where they are refused, None where the model's own
    attention does not tell them apart or nothing was asked.
    """

    model: str
    variant: str
    status: str
    note: str = ""
    error: float | None = None
    packed: bool | None = None
