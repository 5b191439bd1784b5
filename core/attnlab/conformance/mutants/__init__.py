"""Mutants: variants that are right but for one realistic mistake, each of which the suite must catch.

Each names the check that owns its kind of mistake; a test runs that check and expects it to fail. The
mistakes are drawn from faults that people really met. Needs torch; for tests and for curious readers.
"""

from __future__ import annotations

from attnlab.conformance.mutants import behaviour, claims, formulas, golden, gradients, masks, states
from attnlab.conformance.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, TextbookLinear

__all__ = ["MUTANTS", "Mutant", "TextbookAttention", "TextbookDelta", "TextbookLinear"]

MUTANTS: tuple[Mutant, ...] = (
    *masks.MUTANTS,
    *golden.MUTANTS,
    *formulas.MUTANTS,
    *gradients.MUTANTS,
    *behaviour.MUTANTS,
    *states.MUTANTS,
    *claims.MUTANTS,
)
