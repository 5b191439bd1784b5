"""Every registered variant through the conformance suite: quick always, whole where marked `full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlab import Registry, run_checks
from attnlab.conformance import CheckResult

REGISTRY = Registry.from_files(Path(__file__).resolve().parents[2] / "registry.yaml")
# What cannot be had here is a test file's of its own: the kernels of other packages on a GPU.
NAMES = [name for name in REGISTRY.names() if REGISTRY.info(name).unavailable is None]


def told(results: list[CheckResult]) -> str:
    return "\n".join(f"{r.status} {r.check} [{r.case}]: {r.message}\n    {r.repeat}" for r in results if not r.ok)


def test_there_are_variants_to_check() -> None:
    assert {"dot_product", "flash", "additive", "multiplicative", "linearised", "delta_rule"} <= set(NAMES)


@pytest.mark.parametrize(
    "name",
    # A preset is the same class with another option; it has its turn in the full tests.
    [pytest.param(n, marks=[pytest.mark.full] if REGISTRY.info(n).extends else []) for n in NAMES],
)
def test_a_registered_variant_passes_the_quick_checks(name: str) -> None:
    results = run_checks(name, quick=True)
    assert all(r.ok for r in results), told(results)
    assert sum(r.status == "passed" for r in results) > 100


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_registered_variant_passes_every_check(name: str) -> None:
    results = run_checks(name)
    assert all(r.ok for r in results), told(results)
