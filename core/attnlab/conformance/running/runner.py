"""Running checks: `run_checks` and `iter_checks`. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from attnlab.capabilities import ASKABLE, KnownFailure
from attnlab.conformance.compare.messages import where
from attnlab.conformance.compare.unexpected import unexpected
from attnlab.conformance.oracle.cases import Case, fitted, meeting
from attnlab.conformance.running.check import Check, NotApplicable
from attnlab.conformance.running.plan import RENAMED, Planned, all_checks, cases_of, selected
from attnlab.conformance.running.results import BAD, CheckResult, Status
from attnlab.conformance.running.shrinking import explains, shrunk
from attnlab.conformance.running.subject import Subject, subject_of
from attnlab.errors import InvalidInput, PluginError, UnsupportedRequest, WrongResult, nearest
from attnlab.formulas import unverified
from attnlab.requirements import NOTHING


def run_checks(
    variant: Any,
    *,
    only: str | Iterable[str] | None = None,
    case: str | None = None,
    quick: bool = False,
    device: str = "cpu",
) -> list[CheckResult]:
    """Every check on `variant`: one result per check and case, failures told in whole sentences.

    variant: a registered name, alone or with options as JSON (`sliding_window {"left": 3}`; `with_check_options(name)` lists the
    settings that matter), an `Attention` class, or an instance (checked at other sizes through siblings with its options). only: check names, topics or patterns. case: a case's id, or a pattern of ids. quick: fewer
    cases of each check. device: where to run. Raises `UnknownVariant`, `VariantUnavailable`, `PluginError` (an unknown
    name in `known_failures`), or `InvalidInput` for an `only` or a `case` that matches nothing; failures of
    checks are in the results.
    """
    return list(iter_checks(variant, only=only, case=case, quick=quick, device=device))


def iter_checks(
    variant: Any,
    *,
    only: str | Iterable[str] | None = None,
    case: str | None = None,
    quick: bool = False,
    device: str = "cpu",
    shrink: bool = True,
) -> Iterator[CheckResult]:
    """The results of `run_checks` one by one, as they come; not `shrink`: failures too, as they are."""
    checks = selected(only)
    subject = subject_of(variant, device)
    known = known_failures_of(subject)
    matched, ids = case is None, set()
    for check in checks:
        expected = known.get(check.name)
        statuses: list[Status] = []
        failed: list[tuple[Planned, CheckResult]] = []
        for planned in cases_of(check, subject, quick=quick, device=device):
            ids.add(planned.id)
            if case is not None and not fnmatchcase(planned.id, case):
                continue
            matched = True
            result = execute(subject, planned, expected)
            statuses.append(result.status)
            if result.ok or planned.case is None or not shrink:
                yield result
            else:
                failed.append((planned, result))
        yield from _by_cause(subject, check, failed)
        met = "known failure" in statuses or set(statuses) == {"not applicable"}
        if expected is not None and case is None and not met:
            bad = any(status in BAD for status in statuses)
            yield from still_failing(subject, check, expected, quick=quick, device=device, bad=bad)
    if not matched and only is not None:
        for check in checks:
            for planned in _stated(check, subject, str(case), quick=quick, device=device):
                matched = True
                yield execute(subject, planned, known.get(check.name))
    if not matched:
        raise InvalidInput(f"case: no case of {subject.name} is called {case!r}; {_told_ids(str(case), ids - {''})}")


def _stated(check: Check, subject: Subject, line: str, *, quick: bool, device: str) -> Iterator[Planned]:
    """The request of a line that no planned case is, where the check can be asked about it."""
    with suppress(InvalidInput):
        case = Case.parse(line)
        for planned in cases_of(check, subject, quick=quick, device=device):
            if planned.case is not None and planned.case.note == case.note:
                fit = _fitting(subject, check, replace(case, needs=planned.case.needs), device)
                yield from [] if fit is None else [Planned(check, fit, device=device)]
                return


def _fitting(subject: Subject, check: Check, case: Case, device: str) -> Case | None:
    """The request as the variant can be asked for it by this check, None where it cannot."""
    have = subject.capabilities
    able = subject.settings.get(case.options, have)
    fit = meeting(fitted(case, have.head_dims, device, subject.heads), subject.probe.requires)
    if fit is None or fit.missing(able) or check.switched_off(able):
        return None
    return fit


def _by_cause(subject: Subject, check: Check, failed: list[tuple[Planned, CheckResult]]) -> Iterator[CheckResult]:
    """The failures of one check: each cause is told by its smallest request, the other failures that it explains after it."""

    def run(case: Case) -> CheckResult | None:
        fit = _fitting(subject, check, case, case.device)
        return None if fit is None else execute(subject, Planned(check, fit, device=fit.device))

    for _ in range(MOST_CAUSES):
        if not failed:
            return
        planned, result = min(failed, key=lambda one: _size(one[0].case))
        assert planned.case is not None
        small, told = planned.case, result
        if result.seconds < SLOW and check.topic not in NOT_SHRUNK and not planned.case.note:
            small, told = shrunk(run, planned.case, result)
        group = [one for _, one in failed if one is result]
        group += [r for p, r in failed if r is not result and r.status == result.status and explains(small, p.case)]
        failed = [one for one in failed if one[1] not in group]
        for one in (replace(result, message=told.message), *group[1:]):
            yield replace(one, smallest=small.id, alike=len(group))
    yield from (result for _, result in failed)


NOT_SHRUNK = frozenset({"refusals", "registry", "golden", "dtypes", "graphs", "memory"})
"""Topics whose cases are made for one fault each: a smaller one would ask for something else."""
MOST_CAUSES, SLOW = 2, 0.5
"""Causes of one check that are shrunk, and seconds of a request that is too slow for it."""


def _size(case: Case | None) -> tuple[int, int]:
    assert case is not None
    return len(case.features) + bool(case.options), case.batch * case.num_heads * case.query_length * case.key_length


def _told_ids(case: str, ids: set[str]) -> str:
    """The nearest ids, and how they are written."""
    told = nearest(case, ids)
    if len(told) < 400:
        return told
    return f"{told.partition('known: ')[0]}a case is a request in one line, such as {min(ids, key=len)!r}"


def why_unverified(variant: Any) -> str:
    """Why nothing outside of `variant` (a name, class or instance) proves its formula; "" where something does."""
    return unverified(subject_of(variant).probe)


def check_names() -> list[str]:
    """The names that `only` and `known_failures` may use."""
    return [check.name for check in all_checks()]


def known_failures_of(subject: Subject) -> dict[str, KnownFailure]:
    """The variant's declared failures by check; `PluginError` for a name that is no check."""
    named: Mapping[str, KnownFailure] = getattr(subject.probe, "known_failures", {})
    declared = {RENAMED.get(name, name): failure for name, failure in named.items()}
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


def still_failing(
    subject: Subject, check: Check, expected: KnownFailure, *, quick: bool, device: str, bad: bool = False
) -> Iterator[CheckResult]:
    """The results of a strict known failure that did not fail.

    The cases that a quick run left out run first; then the declaration itself is the failure, unless cases failed in another
    way than it states (`bad`, and those that run here).
    """
    wrong = bad
    if quick:
        tried = {p.id for p in cases_of(check, subject, quick=True, device=device)}
        for planned in cases_of(check, subject, quick=False, device=device):
            if planned.case is not None and planned.id not in tried:
                result = execute(subject, planned, expected)
                wrong = wrong or not result.ok
                if result.status != "passed":
                    yield result
                if result.status == "known failure":
                    return
    if wrong:  # which says enough
        return
    yield CheckResult(
        variant=subject.name,
        check=check.name,
        topic=check.topic,
        case="",
        status="failed",
        device=device,
        message=f"{subject.name}: {check.name} is declared a KnownFailure ({expected.reason}) and passes on every case. "
        "Remove the declaration",
    )


def execute(subject: Subject, planned: Planned, expected: KnownFailure | None = None) -> CheckResult:
    """Run one planned case: one result; no exception but KeyboardInterrupt leaves it, sys.exit() included."""
    check = planned.check
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other, and for their neighbours
    try:
        status, message = _outcome(subject, planned, expected)
    finally:
        torch.set_num_threads(threads)
    return CheckResult(
        variant=subject.name,
        check=check.name,
        topic=check.topic,
        case=planned.id,
        status=status,
        message=message,
        seconds=time.perf_counter() - started,
        device=planned.device,
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
            status, message = _of_refusal(subject, planned, refusal)
        except WrongResult:  # every other case would end so too: it is said once
            raise
        except AssertionError as fault:
            status, message = ("failed", _one_line(fault) or f"{subject.name}: an assert without a message failed")
            status, message = _expected(status, message, expected, fault)
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a variant's own code may raise anything
            message = f"{where(subject.probe, case)}: {unexpected(fault)}"
            status, message = _expected("error", message, expected, fault)
    return status, message


def _expected(status: Status, message: str, expected: KnownFailure | None, fault: BaseException) -> tuple[Status, str]:
    if expected is not None and isinstance(fault, expected.raises):
        return "known failure", f"{expected.reason}: {message}"
    return status, message


def _of_refusal(subject: Subject, planned: Planned, refusal: UnsupportedRequest) -> tuple[Status, str]:
    """A refused combination is fine, where each part is declared; a declared askable refused on its own is not."""
    assert planned.case is not None
    askables = planned.case.askables
    if _comes_late(refusal):
        return "failed", (
            f"{where(subject.probe, planned.case)}: attend() refused what Attention.forward had let pass: {refusal}. "
            "Let supports() name it, or `conflicts`: then it is refused before any tensor work, and tools that choose know"
        )
    if {reason.feature for reason in refusal.reasons} <= {
        "length",
        "causal",
        "window",
    } and subject.probe.requires != NOTHING:
        return "not applicable", f"this check makes a call that it does not take: {refusal}"
    if len(askables) > 1 or planned.check.asks_more:
        return "not applicable", f"it refuses this combination: {refusal}"
    named = {reason.feature for reason in refusal.reasons}
    if named and not named & {*ASKABLE, "dtype", "device", "head_dims"} and subject.is_larger(planned.case):
        return "not applicable", f"it refuses this size: {refusal}"
    what = askables[0] if askables else f"a plain call in {planned.case.dtype}"
    return "failed", (
        f"{where(subject.probe, planned.case)}: {what} is declared and refused: {refusal}. "
        "Serve it, or do not declare it"
    )


def _comes_late(refusal: UnsupportedRequest) -> bool:
    """Whether a variant's own code raised it in the middle of a call, after the request was validated."""
    trace, names = refusal.__traceback__, []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return bool({"attend", "absorb"} & set(names)) and "supports" not in names


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())
