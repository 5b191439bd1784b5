"""The conformance suite: checks that a variant does what it declares and refuses what it does not.

    from attnlab.conformance import run_checks
    for result in run_checks("additive"): ...

    from attnlab.conformance import conformance       # in a test file: one pytest item for each check and case
    test_additive = conformance("additive")

Both take a registered name, an `Attention` class or an instance. Names are resolved on first use, so importing
this module, or `CheckResult` for a report, needs no torch.

A plugin adds checks through the hook `attnlab_checks`: a function `check_<property>(variant, case)` that raises
`AssertionError` with a whole message, in `Check(function, topic, cases)`; `case`, `draw`, `demand` and `demand_close`
are what attnlab's own checks are written with.

Packages: `oracle` (cases and their features, inputs, scalar visibility, the definition's answers and their bounds),
`compare` (tolerances, messages, the comparer of a check), `checks` (by topic), `running` (plan, runner, processes, pytest).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Case": "attnlab.conformance.oracle.cases",
    "Check": "attnlab.conformance.running.check",
    "CheckResult": "attnlab.conformance.running.results",
    "NotApplicable": "attnlab.conformance.running.check",
    "Scope": "attnlab.conformance.running.check",
    "case": "attnlab.conformance.oracle.cases",
    "check_names": "attnlab.conformance.running.runner",
    "conformance": "attnlab.conformance.running.pytest_items",
    "demand": "attnlab.conformance.compare.messages",
    "demand_close": "attnlab.conformance.compare.messages",
    "draw": "attnlab.conformance.oracle.inputs",
    "iter_checks": "attnlab.conformance.running.runner",
    "run_checks": "attnlab.conformance.running.runner",
    "why_unverified": "attnlab.conformance.running.runner",
    "with_check_options": "attnlab.conformance.running.subject",
}

__all__ = [
    "Case",
    "Check",
    "CheckResult",
    "NotApplicable",
    "Scope",
    "case",
    "check_names",
    "conformance",
    "demand",
    "demand_close",
    "draw",
    "iter_checks",
    "run_checks",
    "why_unverified",
    "with_check_options",
]

if TYPE_CHECKING:
    from attnlab.conformance.compare.messages import demand, demand_close
    from attnlab.conformance.oracle.cases import Case, case
    from attnlab.conformance.oracle.inputs import draw
    from attnlab.conformance.running.check import Check, NotApplicable, Scope
    from attnlab.conformance.running.pytest_items import conformance
    from attnlab.conformance.running.results import CheckResult
    from attnlab.conformance.running.runner import check_names, iter_checks, run_checks, why_unverified
    from attnlab.conformance.running.subject import with_check_options


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attnlab.conformance' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
