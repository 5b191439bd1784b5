"""Mutants that the checks in `checks/registry.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear


class ClaimsMoreThanItsClass(TextbookAttention):
    capabilities = TextbookAttention.capabilities.narrow(window="not yet")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.capabilities = TextbookAttention.capabilities
        self._bits = self.capabilities.bits


_OWNER = "registry_row_agrees_with_class"


class RowOfAnotherFormula(TextbookAttention):
    """Copied from a neighbour's row."""


class RowPromisesAWindow(TextbookLinear):
    """A listing would offer what the gate refuses."""


class RowForgetsADtype(TextbookAttention):
    """Float64 was added to the class later."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ClaimsMoreThanItsClass, "claims_are_consistent", "an instance widens what its class declares"),
    Mutant(RowOfAnotherFormula, _OWNER, "the row names another formula", {"formula": "additive"}),
    Mutant(
        RowPromisesAWindow,
        _OWNER,
        "the row lists a window that the class does not declare",
        {"capabilities": sorted({*TextbookLinear.capabilities.declared(), "window"})},
    ),
    Mutant(RowForgetsADtype, _OWNER, "the row leaves a dtype out", {"dtypes": ["float32", "bfloat16", "float16"]}),
)
