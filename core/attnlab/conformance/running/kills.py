"""The suite judged: every mutant must be killed by the check that owns its mistake, no correct variant must be accused.

`iter_kills()` and `iter_alarms()` give one record at a time, so that a report can show progress. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from attnlab.conformance.running.results import CheckResult
from attnlab.conformance.running.runner import iter_checks
from attnlab.conformance.running.sharing import Workers
from attnlab_evaluations.suite_proof.mutants import MUTANTS, Mutant

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Kill:
    """What became of one mutant. `message` is the first failure's, "" where it survived."""

    mutant: str
    story: str
    check: str
    topic: str
    killed: bool
    cases: int
    seconds: float
    message: str


@dataclass(frozen=True, slots=True)
class Alarms:
    """What the suite says of one correct variant: `failed` must be empty."""

    variant: str
    cases: int
    seconds: float
    failed: tuple[CheckResult, ...]


def iter_kills(workers: int = 1) -> Iterator[Kill]:
    """Every mutant against the check that owns its kind of mistake; `workers` processes share the work."""
    yield from _shared(_kill_at, range(len(MUTANTS)), workers)


def kill(mutant: Mutant) -> Kill:
    """One mutant against its owner: the quick cases first, all of them where it survives those, to the first failure."""
    started = time.perf_counter()
    cases, topic, message = 0, "", ""
    with _registered(mutant) as subject:
        for quick in (True, False):
            for result in iter_checks(subject, only=mutant.owner, quick=quick):
                cases, topic = cases + 1, result.topic
                if not result.ok:
                    message = result.message
                    break
            if message:
                break
    seconds = time.perf_counter() - started
    return Kill(mutant.name, mutant.story, mutant.owner, topic, bool(message), cases, seconds, message)


def iter_alarms(*, quick: bool = True, workers: int = 1) -> Iterator[Alarms]:
    """Every registered variant that can be had here, the textbook variants and the unusual ones, all of them correct."""
    yield from _shared(partial(_alarms_at, quick=quick), range(len(correct_variants())), workers)


def correct_variants() -> list[tuple[str, Any]]:
    """Names and subjects that no check may accuse: built-in, textbook, unusual."""
    from attnlab.catalogue import default_registry
    from attnlab_evaluations.suite_proof.correct import UNUSUAL
    from attnlab_evaluations.suite_proof.mutants import TEXTBOOK

    registry = default_registry()
    built_in = [n for n in registry.names() if registry.info(n).owner == "attnlab" and not registry.info(n).unavailable]
    classes: tuple[type[Any], ...] = (*TEXTBOOK, *UNUSUAL)
    return [*((name, name) for name in built_in), *((cls.__name__, cls) for cls in classes)]


def _shared(work: Callable[[int], _T], numbers: Iterable[int], workers: int) -> Iterator[_T]:
    """`work(n)` for every number in order, in this process or in `workers` fresh ones."""
    if workers < 2:
        yield from map(work, numbers)
        return
    with Workers(workers) as shared:
        yield from shared.map(work, numbers)


def _kill_at(number: int) -> Kill:
    return kill(MUTANTS[number])


def _alarms_at(number: int, quick: bool) -> Alarms:
    name, subject = correct_variants()[number]
    started = time.perf_counter()
    results = list(iter_checks(subject, quick=quick))
    failed = tuple(r for r in results if not r.ok)
    return Alarms(name, len(results), time.perf_counter() - started, failed)


@contextmanager
def _registered(mutant: Mutant) -> Iterator[Any]:
    """What `iter_checks` is given: the class, or its name in a registry of its own where the mistake is in the row."""
    if not mutant.row:
        yield mutant.variant
        return
    from attnlab.catalogue import default_registry, use_registry
    from attnlab.registry import Registry

    before = default_registry()
    alone = Registry.from_files()
    alone.register("mutant", mutant.variant, **mutant.row)
    use_registry(alone)
    try:
        yield "mutant"
    finally:
        use_registry(before)
