"""The proof of the suite: each mutant must be killed by the check that owns its mistake, no correct variant may fail.

Mutants and correct variants come from plugins, by the hooks `attnlab_mutants` and `attnlab_correct_variants`.
`iter_kills()` and `iter_alarms()` yield one record at a time, so that a report can show progress. Needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from attnlab.catalogue import default_registry, use_registry
from attnlab.conformance.checks import ALL
from attnlab.conformance.running.plan import all_checks, selected
from attnlab.conformance.running.results import CheckResult
from attnlab.conformance.running.runner import iter_checks
from attnlab.conformance.running.sharing import Workers
from attnlab.hooks import Mutant, plugin_manager
from attnlab.interface import Attention
from attnlab.registry import Registry

_T = TypeVar("_T")
Only = Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Kill:
    """The result of one check on one mutant. `message` is the first failure's, "" where the mutant survived."""

    mutant: str
    story: str
    check: str
    topic: str
    killed: bool
    cases: int
    seconds: float
    message: str
    owner: str

    @property
    def missed(self) -> bool:
        """Whether the mutant survived the check that owns its mistake."""
        return not self.killed and self.check == self.owner


@dataclass(frozen=True, slots=True)
class Alarms:
    """The results of the suite on one correct variant: `failed` must be empty."""

    variant: str
    cases: int
    seconds: float
    failed: tuple[CheckResult, ...]


def mutants() -> list[Mutant]:
    """The mutants of every installed plugin."""
    return plugin_manager().gather("attnlab_mutants", partial(_mutant_fault, {check.name for check in all_checks()}))


def correct_variants() -> list[tuple[str, Any]]:
    """Names and subjects on which no check may fail: attnlab's own variants that can be had here, then those of plugins."""
    registry = default_registry()
    built_in = [n for n in registry.names() if registry.info(n).owner == "attnlab" and not registry.info(n).unavailable]
    classes = plugin_manager().gather("attnlab_correct_variants", _variant_fault)
    return [*((name, name) for name in built_in), *((cls.__name__, cls) for cls in classes)]


def pairs(only: Only = None) -> list[tuple[Mutant, str]]:
    """The mutants and the checks to run on them: each with its owner; a plugin's check in `only` with every mutant."""
    every = mutants()
    if only is None:
        return [(mutant, mutant.owner) for mutant in every]
    own = {check.name for check in ALL}
    names = [check.name for check in selected(only)]
    return [(mutant, name) for name in names for mutant in every if mutant.owner == name or name not in own]


def iter_kills(only: Only = None, workers: int = 1) -> Iterator[Kill]:
    """The result of each of `pairs(only)`, in order; `workers` processes share the work."""
    yield from _shared(partial(_kill_at, only=only), len(pairs(only)), workers)


def kill(mutant: Mutant, check: str = "") -> Kill:
    """One mutant against one check (default: its owner), to the first failure.

    The quick cases run first; the owner runs the others too where the mutant survives those.
    """
    check = check or mutant.owner
    started = time.perf_counter()
    cases, topic, message = 0, "", ""
    with _registered(mutant) as subject, _precision_restored():
        for quick in (True, False) if check == mutant.owner else (True,):
            for result in iter_checks(subject, only=check, quick=quick, shrink=False):
                cases, topic = cases + 1, result.topic
                if not result.ok:
                    message = result.message
                    break
            if message:
                break
    seconds = time.perf_counter() - started
    return Kill(mutant.name, mutant.story, check, topic, bool(message), cases, seconds, message, mutant.owner)


def iter_alarms(*, only: Only = None, quick: bool = True, workers: int = 1) -> Iterator[Alarms]:
    """The results of the checks that `only` selects (default: all) on each correct variant."""
    yield from _shared(partial(_alarms_at, only=only, quick=quick), len(correct_variants()), workers)


def _mutant_fault(checks: set[str], item: Any) -> str:
    """Why a plugin's item is no mutant, "" where it is one."""
    if not isinstance(item, Mutant):
        return f"attnlab_mutants must return attnlab.hooks.Mutant objects, got {type(item).__name__}"
    if fault := _variant_fault(item.variant, "attnlab_mutants: Mutant.variant"):
        return fault
    if item.owner not in checks:
        return (
            f"attnlab_mutants: {item.name} names the owner {item.owner!r}, which is no check; name one of check_names()"
        )
    return ""


def _variant_fault(item: Any, what: str = "attnlab_correct_variants: each item") -> str:
    if isinstance(item, type) and issubclass(item, Attention):
        return ""
    return f"{what} must be an Attention class, got {item.__name__ if isinstance(item, type) else type(item).__name__}"


def _shared(work: Callable[[int], _T], count: int, workers: int) -> Iterator[_T]:
    """`work(n)` for every number below `count` in order, in this process or in `workers` fresh ones."""
    if workers < 2:
        yield from map(work, range(count))
        return
    with Workers(workers) as shared:
        yield from shared.map(work, range(count))


def _kill_at(number: int, only: Only) -> Kill:
    return kill(*pairs(only)[number])


def _alarms_at(number: int, only: Only, quick: bool) -> Alarms:
    name, subject = correct_variants()[number]
    started = time.perf_counter()
    results = list(iter_checks(subject, only=only, quick=quick))
    failed = tuple(r for r in results if not r.ok)
    return Alarms(name, len(results), time.perf_counter() - started, failed)


@contextmanager
def _precision_restored() -> Iterator[None]:
    """A mutant whose constructor changes the precision of products must not decide over the next one."""
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _registered(mutant: Mutant) -> Iterator[Any]:
    """The subject for `iter_checks`: the class, or its name in a registry of its own where the mistake is in the row."""
    if not mutant.row:
        yield mutant.variant
        return
    before = default_registry()
    alone = Registry.from_files()
    alone.register("mutant", mutant.variant, **mutant.row)
    use_registry(alone)
    try:
        yield "mutant"
    finally:
        use_registry(before)
