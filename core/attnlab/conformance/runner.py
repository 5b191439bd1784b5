"""Running checks: `run_checks` and `iter_checks`. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from attnlab.capabilities import KnownFailure
from attnlab.conformance.check import NotApplicable
from attnlab.conformance.plan import Planned, all_checks, cases_of, selected
from attnlab.conformance.results import CheckResult, Status
from attnlab.conformance.subject import Subject, subject_of
from attnlab.errors import PluginError, UnsupportedRequest, nearest


def run_checks(
    variant: Any, *, only: str | Iterable[str] | None = None, quick: bool = False, device: str = "cpu"
) -> list[CheckResult]:
    """Every check on `variant`: one result per check and case, failures told in whole sentences.

    variant: a registered name, an `Attention` class, or an instance (checked at other sizes through siblings
    with its options). only: check names, topics or patterns. quick: fewer cases of each check. device: where
    to run. Raises `UnknownVariant`, `VariantUnavailable`, `PluginError` (an unknown name in `known_failures`), or
    `InvalidInput` for a bad `only`; what a check finds is in the results.
    """
    return list(iter_checks(variant, only=only, quick=quick, device=device))


def iter_checks(
    variant: Any, *, only: str | Iterable[str] | None = None, quick: bool = False, device: str = "cpu"
) -> Iterator[CheckResult]:
    """The results of `run_checks` one by one, as they come."""
    checks = selected(only)
    subject = subject_of(variant)
    known = _known_failures(subject)
    for check in checks:
        expected = known.get(check.name)
        statuses: list[Status] = []
        ran: set[str] = set()
        for planned in cases_of(check, subject, quick=quick, device=device):
            result = _execute(subject, planned, expected, device)
            statuses.append(result.status)
            ran.add(result.case)
            yield result
        if expected is not None and "known failure" not in statuses and set(statuses) != {"not applicable"}:
            yield from _strict(subject, check, expected, ran, quick, device)


def check_names() -> list[str]:
    """The names that `only` and `known_failures` may use."""
    return [check.name for check in all_checks()]


def _known_failures(subject: Subject) -> dict[str, KnownFailure]:
    declared = dict(getattr(subject.probe, "known_failures", {}))
    for name, failure in declared.items():
        if name not in check_names():
            raise PluginError(
                f"{subject.name}: known_failures names {name!r}, which is no check; {nearest(name, check_names())}"
            )
        if not isinstance(failure, KnownFailure):
            raise PluginError(
                f"{subject.name}: known_failures[{name!r}] must be a KnownFailure(reason, raises=...), "
                f"got {type(failure).__name__}"
            )
    return declared


def _strict(
    subject: Subject, check: Any, expected: KnownFailure, ran: set[str], quick: bool, device: str
) -> Iterator[CheckResult]:
    """A known failure that did not fail: look at the cases a quick run left out, then report it."""
    if quick:
        for planned in cases_of(check, subject, quick=False, device=device):
            if planned.case is not None and planned.case.id not in ran:
                result = _execute(subject, planned, expected, device)
                if result.status != "passed":
                    yield result
                if result.status == "known failure":
                    return
    yield CheckResult(
        variant=subject.name,
        check=check.name,
        topic=check.topic,
        case="known failure",
        status="failed",
        device=device,
        message=f"{subject.name}: {check.name} is declared a KnownFailure ({expected.reason}) and passes on every case. "
        "Remove the declaration",
    )


def _execute(subject: Subject, planned: Planned, expected: KnownFailure | None, device: str) -> CheckResult:
    """One result; no exception but KeyboardInterrupt and SystemExit leaves it."""
    check, case = planned.check, planned.case
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # the tensors are tiny: more threads only wait for each other, and for their neighbours
    try:
        status, message = _outcome(subject, planned, expected)
    finally:
        torch.set_num_threads(threads)
    return CheckResult(
        variant=subject.name,
        check=check.name,
        topic=check.topic,
        case="" if case is None else case.id,
        status=status,
        message=message,
        seconds=time.perf_counter() - started,
        device=device,
    )


def _outcome(subject: Subject, planned: Planned, expected: KnownFailure | None) -> tuple[Status, str]:
    check, case = planned.check, planned.case
    status: Status = "passed"
    message = ""
    if case is None:
        status, message = "not applicable", planned.reason
    else:
        try:
            check.function(subject.instance(case), case)
            if check.topic == "refusals" and case.note:
                status, message = "refused", f"{case.note} is not declared and was refused"
        except NotApplicable as reason:
            status, message = "not applicable", str(reason)
        except UnsupportedRequest as refusal:
            status, message = _judged_refusal(subject, planned, refusal)
        except AssertionError as fault:
            status, message = (
                "failed",
                _one_line(fault) or f"{subject.name}: an assert without a message failed",
            )
            status, message = _expected(status, message, expected, fault)
        except Exception as fault:
            message = (
                f"{subject.name} ({case.id}): {type(fault).__name__} where none was expected: {_one_line(fault)}. "
                f"Run the command again with a debugger, or python -X dev, for the traceback"
            )
            status, message = _expected("error", message, expected, fault)
    return status, message


def _expected(
    status: Status, message: str, expected: KnownFailure | None, fault: Exception
) -> tuple[Status, str]:
    if expected is not None and isinstance(fault, expected.raises):
        return "known failure", f"{expected.reason}: {message}"
    return status, message


def _judged_refusal(subject: Subject, planned: Planned, refusal: UnsupportedRequest) -> tuple[Status, str]:
    """A refused combination is fine, where each part is declared; a declared askable refused on its own is not."""
    assert planned.case is not None
    asked = list(planned.case.askables)
    if len(asked) > 1 or planned.check.asks_more:
        return "not applicable", f"it refuses this combination: {refusal}"
    what = asked[0] if asked else f"a plain call in {planned.case.dtype}"
    return "failed", (
        f"{subject.name} ({planned.case.id}): {what} is declared and refused: {refusal}. "
        "Serve it, or do not declare it"
    )


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())
