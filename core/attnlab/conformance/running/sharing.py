"""Checks in worker processes. The process that starts them needs only the standard library.

A variant that ends its process, by `os._exit` or by native code that writes where it must not, costs the check at fault and not
the run. What it prints goes to stderr, so that a report on stdout stays whole.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import active_children, get_context, parent_process
from typing import Any, NamedTuple, TypeVar

from attnlab.conformance.running.results import CheckResult
from attnlab.errors import PluginError

_T = TypeVar("_T")

MOST_BROKEN = 3  # checks that end their process before the others are left alone: each costs a process


def silent(name: str) -> str:
    """The message about a variant that ended its process."""
    return (
        f"{name}: the process ended without a word, as by os._exit or by native code that reads or writes where it must not; "
        f"`python -X faulthandler -m attnlab check {name} --jobs 1` may show where"
    )


def usable_cores() -> int:
    """The cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


class CheckFacts(NamedTuple):
    """The facts of a check that need no torch."""

    name: str
    topic: str
    slow: bool


class Workers:
    """`count` processes that run checks by name; a context manager, which kills them where its body raises.

    Each reads the registry anew: names that were registered only in this process are unknown there.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = _pool(count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *how: object) -> None:
        if kind is not None and not issubclass(kind, OSError):  # what a check is busy with may never end
            for child in active_children():
                child.kill()
        self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[int], _T], numbers: Iterable[int]) -> Iterator[_T]:
        """`work(n)` for every number, in order."""
        for future in [self._submit(work, n) for n in numbers]:
            yield future.result()

    def why_unverified(self, name: str) -> str:
        """`attnlab.conformance.why_unverified(name)`."""
        return self._ask(_why_unverified, name)

    def iter_checks(
        self, name: str, *, only: Sequence[str] | None, case: str | None, quick: bool, device: str
    ) -> Iterator[CheckResult]:
        """The results of `attnlab.conformance.iter_checks`, in its order; it raises what that raises.

        `PluginError` where the process ends while the variant is imported or made.
        """
        with suppress(BrokenProcessPool):
            for _ in range(self.count - 1):  # the others import torch and the variant meanwhile
                self._submit(_import, name, device)
        try:
            checks = self._ask(_checks, name, only, device)
        except BrokenProcessPool:
            raise PluginError(silent(name)) from None
        if case is not None:
            yield from self._alone(name, checks, only, case, quick, device)
            return
        slow = tuple(check.name for check in checks if check.slow)  # together, and begun first: they take longest
        futures: dict[str, Future[list[CheckResult]]] = {}
        for part in (*([slow] if slow else []), *((check.name,) for check in checks if not check.slow)):
            futures |= dict.fromkeys(part, self._submit(_results, name, part, None, quick, device))
        for number, check in enumerate(checks):
            try:
                results = futures[check.name].result()
            except BrokenProcessPool:  # which of the checks under way it was shows one by one
                yield from self._one_by_one(name, checks[number:], quick, device)
                return
            yield from (result for result in results if result.check == check.name)

    def _one_by_one(self, name: str, checks: Sequence[CheckFacts], quick: bool, device: str) -> Iterator[CheckResult]:
        self.count, broken = 1, 0
        for number, check in enumerate(checks):
            results = self._alone(name, [check], check.name, None, quick, device)
            yield from results
            broken += any(silent(name) == r.message for r in results)
            if broken == MOST_BROKEN and number + 1 < len(checks):
                more = (
                    f"{broken} checks ended their process; the {len(checks) - number - 1} after this one were not run"
                )
                yield _error(name, check, device, f"{name}: {more}")
                return

    def _alone(
        self,
        name: str,
        checks: Sequence[CheckFacts],
        only: Sequence[str] | str | None,
        case: str | None,
        quick: bool,
        device: str,
    ) -> list[CheckResult]:
        try:
            return self._ask(_results, name, only, case, quick, device)
        except BrokenProcessPool:
            return [_error(name, checks[0], device, silent(name))]

    def _submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        with _without_interrupts():  # a process that is being started would tell of one by a traceback
            return self._pool.submit(work, *arguments)

    def _ask(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """`work(*arguments)` in one of the processes; once more in new ones where the last ones were broken already."""
        try:
            return self._submit(work, *arguments).result()
        except BrokenProcessPool:
            self._pool.shutdown()
            self._pool = _pool(self.count)
            return self._submit(work, *arguments).result()


def _error(name: str, check: CheckFacts, device: str, message: str) -> CheckResult:
    return CheckResult(
        variant=name, check=check.name, topic=check.topic, case="", status="error", message=message, device=device
    )


def _pool(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """An interrupt waits meanwhile, and for good in processes that are started meanwhile (where the system can do that)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In a new process: Ctrl-C is for the one that asks, whose end is its own end; what a variant prints is no report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.dup2(2, 1)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _subject(name: str, device: str) -> Any:
    from attnlab.conformance.running.subject import subject_of

    subject = subject_of(name, device)
    gc.freeze()  # torch's own objects live for ever and need no collector
    return subject


def _import(name: str, device: str) -> None:
    with suppress(Exception):  # told by what comes after
        _subject(name, device)


def _checks(name: str, only: Sequence[str] | None, device: str) -> list[CheckFacts]:
    """The selected checks; raises where the variant cannot be checked at all."""
    from attnlab.conformance.running.plan import selected
    from attnlab.conformance.running.runner import known_failures_of

    checks = selected(only)
    known_failures_of(_subject(name, device))
    return [CheckFacts(check.name, check.topic, check.slow) for check in checks]


def _why_unverified(name: str) -> str:
    from attnlab.conformance.running.runner import why_unverified

    return why_unverified(name)


def _results(
    name: str, only: Sequence[str] | str | None, case: str | None, quick: bool, device: str
) -> list[CheckResult]:
    from attnlab.conformance.running.runner import iter_checks

    return list(iter_checks(_subject(name, device), only=only, case=case, quick=quick, device=device))
