"""Mutants whose mistake stands in their registry row: it says something else than the class. Needs torch."""

from __future__ import annotations

from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear

_OWNER = "registry_row_agrees_with_class"


class RowOfAnotherFormula(TextbookAttention):
    """Copied from a neighbour's row."""


class RowPromisesAWindow(TextbookLinear):
    """A listing would offer what the gate refuses."""


class RowForgetsADtype(TextbookAttention):
    """Float64 was added to the class later."""


MUTANTS = (
    Mutant(RowOfAnotherFormula, _OWNER, "the row names another formula", {"formula": "additive"}),
    Mutant(
        RowPromisesAWindow,
        _OWNER,
        "the row lists a window that the class does not declare",
        {"capabilities": sorted({*TextbookLinear.capabilities.declared(), "window"})},
    ),
    Mutant(RowForgetsADtype, _OWNER, "the row leaves a dtype out", {"dtypes": ["float32", "bfloat16", "float16"]}),
)
