"""Shrinking: the smallest request that fails as a given one does. Needs torch through `cases`.

Features are dropped, sizes halved and contents made ordinary as long as the same check fails, as property-based tests do
(Claessen and Hughes 2000, "QuickCheck"). Without any feature that is left the check passes, which names the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.running.results import CheckResult

TRIES, SECONDS = 100, 1.5
"""The most requests, and the most time, that one failure is shrunk with."""
SMALL = {"batch": 1, "query_length": 1, "key_length": 1, "head_dim": 4, "key_dim": 4, "value_dim": 4}

Run = Callable[[Case], CheckResult | None]
"""The result of a request, None where the variant cannot be asked for it."""


def shrunk(run: Run, case: Case, failure: CheckResult) -> tuple[Case, CheckResult]:
    """The smallest request found that ends in the same status, and its result."""
    end, tries = time.monotonic() + SECONDS, 0
    tried = {case}
    smaller = True
    while smaller:
        smaller = False
        for other in simpler(case):
            if other in tried:
                continue
            if tries == TRIES or time.monotonic() > end:
                return case, failure
            tried.add(other)
            tries += 1
            result = run(other)
            if result is not None and result.status == failure.status:
                case, failure, smaller = other, result, True
                break
    return case, failure


def simpler(case: Case) -> Iterator[Case]:
    """Requests that are simpler in one respect, the largest steps first."""
    if len(case.features) > 1:
        yield replace(case, features=())
        half = len(case.features) // 2
        yield from (replace(case, features=part) for part in (case.features[:half], case.features[half:]))
    for n in range(len(case.features)):
        yield replace(case, features=(*case.features[:n], *case.features[n + 1 :]))
    if case.options:
        yield replace(case, options="")
    if case.seed:
        yield replace(case, seed=0)
    if case.dtype != "float32":
        yield replace(case, dtype="float32")
    if case.query_length != case.key_length:
        yield replace(case, query_length=case.key_length)
    yield from _smaller_sizes(case)


def _smaller_sizes(case: Case) -> Iterator[Case]:
    for kv_heads in dict.fromkeys((1, case.num_kv_heads // 2)):
        if 0 < kv_heads < case.num_kv_heads:
            yield replace(case, num_heads=kv_heads * (case.num_heads // case.num_kv_heads), num_kv_heads=kv_heads)
    if case.num_heads > case.num_kv_heads:
        yield replace(case, num_heads=case.num_kv_heads)
    lengths: list[tuple[str, ...]] = [("query_length", "key_length")]
    if case.query_length != case.key_length:
        lengths += [("query_length",), ("key_length",)]
    for group in (("batch",), *lengths, ("head_dim", "key_dim", "value_dim")):
        now = {name: int(getattr(case, name)) for name in group}
        for less in ({name: n // 2 for name, n in now.items()}, {name: n - 1 for name, n in now.items()}):
            sizes: dict[str, Any] = {name: max(SMALL[name], n) for name, n in less.items()}
            if all(sizes[name] <= now[name] for name in group):
                yield replace(case, **sizes)


def explains(small: Case, case: Case | None) -> bool:
    """Whether `case` asks for all that `small` needs to fail."""
    if case is None:
        return False
    sizes = ("batch", "num_heads", "query_length", "key_length")
    return (
        set(small.features) <= set(case.features)
        and small.options in ("", case.options)
        and small.dtype in ("float32", case.dtype)
        and all(getattr(small, name) <= getattr(case, name) for name in sizes)
    )
