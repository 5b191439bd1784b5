"""Every mutant fails the check that owns its mistake, and lives in the file named as that check's file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from attnlab.conformance.checks import ALL
from attnlab.conformance.running.kills import kill
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof import mutants
from attnlab_evaluations.suite_proof.mutants import MUTANTS


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


def test_every_check_owns_a_mutant() -> None:
    assert {mutant.owner for mutant in MUTANTS} == {check.name for check in ALL}


def test_a_mutant_lives_in_the_file_named_as_the_file_of_the_check_that_owns_it() -> None:
    homes = {check.name: check.function.__module__.rpartition(".")[2] for check in ALL}
    for module in set(homes.values()):
        here = importlib.import_module(f"{mutants.__name__}.{module}").MUTANTS
        assert {homes[mutant.owner] for mutant in here} == {module}
    files = {path.stem for path in Path(mutants.__file__).parent.glob("[a-z]*.py")}
    assert files == set(homes.values())


def test_mutants_have_names_of_their_own_and_tell_a_story() -> None:
    pairs = [(mutant.name, mutant.owner) for mutant in MUTANTS]
    assert len(set(pairs)) == len(pairs)
    assert all(len(mutant.story) > 5 for mutant in MUTANTS)
