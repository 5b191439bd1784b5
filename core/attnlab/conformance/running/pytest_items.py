"""`conformance(variant)`: one pytest item for each check and case, in anybody's test file. Needs torch and pytest.

from attnlab.conformance import conformance
test_my_variant = conformance("my_variant")          # or a class, or an instance
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attnlab.capabilities import KnownFailure
from attnlab.conformance.running.check import Check
from attnlab.conformance.running.plan import Planned, cases_of, selected
from attnlab.conformance.running.results import CheckResult
from attnlab.conformance.running.runner import execute, known_failures_of, still_failing
from attnlab.conformance.running.subject import Subject, subject_of
from attnlab.errors import AttnlabError


@dataclass(frozen=True, slots=True)
class Item:
    """What one pytest item runs: a planned case, or (with none) whether a declared failure still fails."""

    subject: Subject
    check: Check
    planned: Planned | None
    expected: KnownFailure | None
    quick: bool
    device: str

    @property
    def id(self) -> str:
        """`my_variant-agrees_with_definition-batch=2 heads=2 lengths=7/7 width=8 causal float32`."""
        tail = "known_failure_still_fails" if self.planned is None else self.planned.id or "not_applicable"
        return f"{self.subject.name}-{self.check.name}-{tail}"

    def run(self) -> CheckResult:
        """The result of the case, or of all the check's cases where a failure is declared."""
        if self.planned is not None:
            return execute(self.subject, self.planned, self.expected)
        assert self.expected is not None
        results = []
        for planned in cases_of(self.check, self.subject, quick=self.quick, device=self.device):
            results.append(execute(self.subject, planned, self.expected))
            if results[-1].status == "known failure":
                return results[-1]
        wrong = [r for r in results if not r.ok]
        if wrong or all(r.status == "not applicable" for r in results):
            return (wrong or results)[0]
        more = still_failing(self.subject, self.check, self.expected, quick=self.quick, device=self.device)
        return list(more)[-1]


def conformance(
    variant: Any, *, only: str | Iterable[str] | None = None, quick: bool = False, device: str = "cpu"
) -> Callable[..., None]:
    """A pytest test of `variant`, with one item for each check and case.

    variant: a registered name, an `Attention` class, or an instance. only, quick, device: as for `run_checks`.
    A declared `KnownFailure` is an expected failure, and a failed item where it no longer fails; what does not
    apply to the variant is skipped with its reason. A variant that cannot be had is one failed item that says why.
    """
    try:
        import pytest
    except ImportError:
        raise ImportError("attnlab.conformance.conformance needs pytest; pip install pytest") from None

    try:
        items = _items(variant, only, quick, device)
    except AttnlabError as problem:
        why = str(problem)

        def test_unusable() -> None:
            pytest.fail(why, pytrace=False)

        return test_unusable

    @pytest.mark.parametrize("item", [pytest.param(item, id=item.id) for item in items])
    def test_conformance(item: Item) -> None:
        result = item.run()
        if result.status == "known failure":
            pytest.xfail(result.message)
        if result.status == "not applicable":
            pytest.skip(result.message)
        if not result.ok:
            pytest.fail(f"{result.message}\nrepeat: {result.repeat}", pytrace=False)

    test_conformance.__doc__ = f"Every conformance check of {items[0].subject.name}." if items else None
    return test_conformance


def _items(variant: Any, only: str | Iterable[str] | None, quick: bool, device: str) -> list[Item]:
    subject = subject_of(variant)
    known = known_failures_of(subject)
    items = []
    for check in selected(only):
        expected = known.get(check.name)
        for planned in cases_of(check, subject, quick=quick, device=device):
            items.append(Item(subject, check, planned, expected, quick, device))
        if expected is not None:
            items.append(Item(subject, check, None, expected, quick, device))
    return items
