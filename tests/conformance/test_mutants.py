"""Every mutant is caught by the check that owns its mistake; the variants they are made from pass everything."""

from __future__ import annotations

import pytest

from attnlab.conformance import run_checks
from attnlab.conformance.mutants import MUTANTS, Mutant, TextbookAttention, TextbookDelta, TextbookLinear
from attnlab.conformance.plan import all_checks
from attnlab.interface import Attention

# The registry check needs a registered name, which no mutant has; tests/conformance/test_registry_check.py breaks its row.
WITHOUT_MUTANT = {"registry_row_agrees_with_class"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.name}-{m.owner}")
def test_a_mutant_fails_the_check_that_owns_its_mistake(mutant: Mutant) -> None:
    for quick in (True, False):  # most die of the first few cases
        results = run_checks(mutant.variant, only=mutant.owner, quick=quick)
        failed = [r for r in results if not r.ok]
        if failed:
            break
    assert failed, (
        f"{mutant.name} ({mutant.story}) survives {mutant.owner}: "
        + str([(r.status, r.message) for r in results])[:2000]
    )
    for result in failed:
        assert mutant.name in result.message
        assert len(result.message) > 60


@pytest.mark.parametrize("variant", [TextbookAttention, TextbookLinear, TextbookDelta])
def test_the_textbook_variants_pass_every_check(variant: type[Attention]) -> None:
    bad = [f"{r.check} [{r.case}]: {r.message}" for r in run_checks(variant, quick=True) if not r.ok]
    assert not bad, "\n".join(bad)


def test_every_check_owns_a_mutant() -> None:
    owners = {mutant.owner for mutant in MUTANTS}
    names = {check.name for check in all_checks()}
    assert owners <= names, f"no such checks: {owners - names}"
    assert names - owners == WITHOUT_MUTANT
