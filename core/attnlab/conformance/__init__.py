"""The conformance suite: what a variant declares is proved, what it does not declare is refused.

    from attnlab.conformance import run_checks
    for result in run_checks("additive"): ...

`run_checks` takes a registered name, an `Attention` class or an instance. Names are resolved on first use,
so importing this module, or `CheckResult` for a report, needs no torch.

Modules: `formulas` (outside, the definitions), `visibility` (who sees whom, scalar), `tolerances`, `features` and
`cases` (what is asked), `inputs` (tensors), `checks` (by topic), `runner`, `mutants` (variants that must fail).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "CheckResult": "attnlab.conformance.results",
    "check_names": "attnlab.conformance.runner",
    "iter_checks": "attnlab.conformance.runner",
    "run_checks": "attnlab.conformance.runner",
}

__all__ = ["CheckResult", "check_names", "iter_checks", "run_checks"]

if TYPE_CHECKING:
    from attnlab.conformance.results import CheckResult
    from attnlab.conformance.runner import check_names, iter_checks, run_checks


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attnlab.conformance' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
