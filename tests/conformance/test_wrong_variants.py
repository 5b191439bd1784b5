"""Wrong variants that were written from the kinds of their faults, before anybody looked for the checks that might find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from wrong_variants import ALIVE, WRONG

from attnlab import Attention
from attnlab.conformance import CheckResult
from attnlab.conformance.running.runner import iter_checks


def subjects(variant: type[Attention]) -> Iterator[Any]:
    """The class, and an instance for each setting of its options that matters."""
    yield variant
    for options in getattr(variant, "check_options", ()):
        yield variant(num_heads=2, head_dim=8, **options)


def first_failure(variant: type[Attention]) -> CheckResult | None:
    """The first failure of a quick run, else of a whole one."""
    for quick in (True, False):
        for subject in subjects(variant):
            for result in iter_checks(subject, quick=quick):
                if not result.ok:
                    return result
    return None


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=variant.__name__, marks=[pytest.mark.full] if number % 3 else [])
        for number, variant in enumerate(v for v in WRONG if v.__name__ not in ALIVE)
    ],
)
def test_a_wrong_variant_fails_some_check(variant: type[Attention]) -> None:
    found = first_failure(variant)
    assert found is not None, f"{variant.__name__} passes every check"
    assert found.status == "failed", found.message


@pytest.mark.full
@pytest.mark.parametrize("variant", [v for v in WRONG if v.__name__ in ALIVE], ids=lambda v: v.__name__)
def test_what_the_suite_does_not_find_yet_is_listed_as_alive(variant: type[Attention]) -> None:
    found = first_failure(variant)
    assert found is None, f"take {variant.__name__} out of ALIVE: {found and found.message}"
