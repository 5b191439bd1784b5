"""Mutants: variants that are right but for one realistic mistake, each of which the suite must catch.

Each names the check that owns its kind of mistake; a test runs that check and expects it to fail. The
mistakes are drawn from faults that people really met. Needs torch; for tests and for curious readers.
"""

from __future__ import annotations

from attnlab.interface import Attention
from attnlab_evaluations.suite_proof.mutants import (
    arguments,
    author_products,
    author_scores,
    backwards,
    behaviour,
    between_calls,
    chunks,
    claims,
    constructors,
    corners,
    dropouts,
    engines,
    formulas,
    golden,
    gradients,
    graphs,
    half_sums,
    heads,
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
from attnlab_evaluations.suite_proof.mutants._methods import (
    TextbookAdditive,
    TextbookAlibi,
    TextbookConcat,
    TextbookCosine,
    TextbookDistance,
    TextbookDot,
    TextbookLocal,
    TextbookLocation,
    TextbookLuong,
    TextbookRelative,
    TextbookRotary,
)
from attnlab_evaluations.suite_proof.mutants._sums import (
    TextbookChunked,
    TextbookCosformer,
    TextbookGatedDelta,
    TextbookMaps,
)
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._tiled import TextbookTiled
from attnlab_evaluations.suite_proof.mutants.chunks import TextbookChunkedDelta

__all__ = ["MUTANTS", "TEXTBOOK", "Mutant", "TextbookAttention", "TextbookDelta", "TextbookLinear"]

TEXTBOOK: tuple[type[Attention], ...] = (
    TextbookAttention,
    TextbookLinear,
    TextbookDelta,
    TextbookTiled,
    TextbookChunked,
    TextbookGatedDelta,
    TextbookChunkedDelta,
    TextbookMaps,
    TextbookCosformer,
    TextbookDot,
    TextbookAdditive,
    TextbookLuong,
    TextbookConcat,
    TextbookLocation,
    TextbookCosine,
    TextbookDistance,
    TextbookLocal,
    TextbookRelative,
    TextbookAlibi,
    TextbookRotary,
)
"""The correct variants that mutants are made from."""

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
    *half_sums.MUTANTS,
    *heads.MUTANTS,
    *layouts.MUTANTS,
    *linear.MUTANTS,
    *narrow_dtypes.MUTANTS,
    *recurrences.MUTANTS,
    *chunks.MUTANTS,
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
    *corners.MUTANTS,
    *between_calls.MUTANTS,
)
