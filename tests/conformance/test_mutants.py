"""Every mutant is caught by the check that owns its mistake; the variants they are made from pass everything."""

from __future__ import annotations

from typing import Any

import pytest

from attnlab.conformance import run_checks
from attnlab.conformance.checks import ALL
from attnlab.conformance.running.kills import kill
from attnlab.interface import Attention
from attnlab_evaluations.suite_proof.mutants import MUTANTS, TEXTBOOK, Mutant


def _marked() -> list[Any]:
    """Every mutant; those beyond the first of each check are part of the full tests."""
    seen: set[str] = set()
    items = []
    for mutant in MUTANTS:
        marks = [pytest.mark.full] if mutant.owner in seen else []
        seen.add(mutant.owner)
        items.append(pytest.param(mutant, id=f"{mutant.name}-{mutant.owner}", marks=marks))
    return items


@pytest.mark.parametrize("mutant", _marked())
def test_a_mutant_fails_the_check_that_owns_its_mistake(mutant: Mutant) -> None:
    verdict = kill(mutant)
    assert verdict.killed, f"{mutant.name} ({mutant.story}) survives {verdict.cases} cases of {mutant.owner}"
    assert mutant.name in verdict.message or mutant.row
    assert len(verdict.message) > 60


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.full] * (i > 3)) for i, v in enumerate(TEXTBOOK)]
)
def test_the_textbook_variants_pass_every_check(variant: type[Attention]) -> None:
    bad = [f"{r.check} [{r.case}]: {r.message}" for r in run_checks(variant, quick=True) if not r.ok]
    assert not bad, "\n".join(bad)


def test_every_check_owns_a_mutant() -> None:
    assert {mutant.owner for mutant in MUTANTS} == {check.name for check in ALL}


def test_mutants_have_names_of_their_own_and_tell_a_story() -> None:
    pairs = [(mutant.name, mutant.owner) for mutant in MUTANTS]
    assert len(set(pairs)) == len(pairs)
    assert all(len(mutant.story) > 5 for mutant in MUTANTS)
