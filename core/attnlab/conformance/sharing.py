"""All checks of registered variants, shared among processes. The process that asks needs only the standard library."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, TypeVar

from attnlab.conformance.results import CheckResult
from attnlab.errors import PluginError

_T = TypeVar("_T")

SILENT = (
    "the process ended without a word, as native code does that reads or writes where it must not; "
    "`python -X faulthandler -m attnlab check NAME --jobs 1` shows where"
)


def usable_cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


class Workers:
    """`count` processes that run checks by name; a context manager.

    Each reads the registry anew: names that were registered only in this process are unknown there. A variant that ends a
    process costs the check at fault, not the run.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = _pool(count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *how: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def why_unverified(self, name: str) -> str:
        """`attnlab.conformance.why_unverified(name)`."""
        return self._ask(_why_unverified, name)

    def iter_checks(
        self, name: str, *, only: Sequence[str] | None, quick: bool, device: str
    ) -> Iterator[CheckResult]:
        """The results of `attnlab.conformance.iter_checks`, in its order; it raises what that raises.

        `PluginError` where the process ends while the variant is imported or made.
        """
        try:
            checks = self._ask(_checks, name, only)
        except BrokenProcessPool:
            raise PluginError(f"{name}: {SILENT}") from None
        shared = [self._pool.submit(_results, name, check, quick, device) for check, _ in checks]
        for number, future in enumerate(shared):
            try:
                results = future.result()
            except BrokenProcessPool:  # which of the checks under way it was is found out one by one
                for check, topic in checks[number:]:
                    yield from self._alone(name, check, topic, quick, device)
                return
            yield from results

    def _alone(self, name: str, check: str, topic: str, quick: bool, device: str) -> list[CheckResult]:
        try:
            return self._ask(_results, name, check, quick, device)
        except BrokenProcessPool:
            ended = CheckResult(
                variant=name, check=check, topic=topic, case="", status="error", message=f"{name}: {SILENT}"
            )
            return [ended]

    def _ask(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """`work(*arguments)` in one of the processes, which are made anew where the last ones broke."""
        try:
            future = self._pool.submit(work, *arguments)
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = _pool(self.count)
            future = self._pool.submit(work, *arguments)
        return future.result()


def _pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks


@lru_cache(maxsize=1)
def _subject(name: str) -> Any:
    from attnlab.conformance.subject import subject_of

    subject = subject_of(name)
    gc.freeze()  # torch's own objects live for ever and need no collector
    return subject


def _checks(name: str, only: Sequence[str] | None) -> list[tuple[str, str]]:
    """Names and topics of the selected checks; raises where the variant cannot be checked at all."""
    from attnlab.conformance.plan import selected
    from attnlab.conformance.runner import known_failures_of

    checks = selected(only)
    known_failures_of(_subject(name))
    return [(check.name, check.topic) for check in checks]


def _why_unverified(name: str) -> str:
    from attnlab.conformance.runner import why_unverified

    return why_unverified(_subject(name))


def _results(name: str, check: str, quick: bool, device: str) -> list[CheckResult]:
    from attnlab.conformance.runner import iter_checks

    return list(iter_checks(_subject(name), only=check, quick=quick, device=device))
