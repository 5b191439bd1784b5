"""Mutants: variants that are right but for one realistic mistake, each of which the suite must catch.

Each names the check that owns its kind of mistake; a test runs that check and expects it to fail. The
mistakes are drawn from faults that people really met. Needs torch; for tests and for curious readers.
"""

from __future__ import annotations

from attnlab.conformance.mutants import (
    arguments,
    author_products,
    author_scores,
    backwards,
    behaviour,
    claims,
    constructors,
    dropouts,
    engines,
    formulas,
    golden,
    gradients,
    graphs,
    layouts,
    linear,
    masks,
    narrow_dtypes,
    packed,
    recurrences,
    returned,
    rows,
    sizes,
    specials,
    states,
    states_copies,
    states_life,
    states_modes,
    states_sums,
    surroundings,
    transforms,
)
from attnlab.conformance.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, TextbookLinear

__all__ = ["MUTANTS", "Mutant", "TextbookAttention", "TextbookDelta", "TextbookLinear"]

MUTANTS: tuple[Mutant, ...] = (
    *masks.MUTANTS,
    *golden.MUTANTS,
    *formulas.MUTANTS,
    *gradients.MUTANTS,
    *behaviour.MUTANTS,
    *arguments.MUTANTS,
    *author_products.MUTANTS,
    *author_scores.MUTANTS,
    *backwards.MUTANTS,
    *constructors.MUTANTS,
    *dropouts.MUTANTS,
    *engines.MUTANTS,
    *layouts.MUTANTS,
    *linear.MUTANTS,
    *narrow_dtypes.MUTANTS,
    *recurrences.MUTANTS,
    *returned.MUTANTS,
    *specials.MUTANTS,
    *packed.MUTANTS,
    *rows.MUTANTS,
    *sizes.MUTANTS,
    *states.MUTANTS,
    *states_copies.MUTANTS,
    *states_life.MUTANTS,
    *states_modes.MUTANTS,
    *states_sums.MUTANTS,
    *claims.MUTANTS,
    *surroundings.MUTANTS,
    *transforms.MUTANTS,
    *graphs.MUTANTS,
)
