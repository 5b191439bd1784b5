"""The conformance checks before any measurement: a variant that fails its conformance checks gets "wrong: <check>" instead.

Needs torch through `attnlab.run_checks`, which a caller may replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab import AttnlabError, PluginError

FAILING = ("failed", "error")


@dataclass(frozen=True)
class Verdict:
    """`status` is a table's status word; `reason` says which check failed, `known` which are known to fail.

    `checks` counts what ran; `message` is the first failing check's own.
    """

    status: str
    reason: str = ""
    known: tuple[str, ...] = ()
    checks: int = 0
    message: str = ""

    @property
    def may_be_measured(self) -> bool:
        return self.status == "ok"


def verdict_of(variant: Any, run_checks: Callable[..., Sequence[Any]], *, device: str = "cpu") -> Verdict:
    """Run the quick checks of a name or an instance and sum them up. An error of attnlab's own means it cannot be had at all."""
    try:
        results = list(run_checks(variant, quick=True, device=device))
    except PluginError as error:
        return Verdict("wrong", "the plugin is broken", message=str(error))
    except AttnlabError as error:
        return Verdict("unsupported", str(error))
    known = tuple(dict.fromkeys(r.check for r in results if r.status == "known failure"))
    bad = [r for r in results if r.status in FAILING]
    if bad:
        names = list(dict.fromkeys(r.check for r in bad))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return Verdict("wrong", names[0] + more, known, len(results), bad[0].message)
    return Verdict("ok", "", known, len(results))
