"""Which checks run on which cases for one variant: the one generator behind every entrance. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from attnlab.conformance.cases import Case, fitted
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.checks import ALL
from attnlab.conformance.subject import Subject
from attnlab.errors import InvalidInput, nearest


@dataclass(frozen=True, slots=True)
class Planned:
    """A check and one case of it; without a case, `reason` says why the check does not apply."""

    check: Check
    case: Case | None
    reason: str = ""


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they run."""
    return ALL


def selected(only: str | Iterable[str] | None) -> list[Check]:
    """The checks that `only` names: check names, topics, or patterns with `*`; None means all.

    A word that matches nothing is `InvalidInput` with the nearest names.
    """
    checks = all_checks()
    if only is None:
        return list(checks)
    chosen: set[str] = set()
    for word in [only] if isinstance(only, str) else only:
        hits = {c.name for c in checks if fnmatchcase(c.name, word) or fnmatchcase(c.topic, word)}
        if not hits:
            known = {c.name for c in checks} | {c.topic for c in checks}
            raise InvalidInput(f"only: no check and no topic is called {word!r}; {nearest(word, known)}")
        chosen |= hits
    return [c for c in checks if c.name in chosen]


def cases_of(check: Check, subject: Subject, *, quick: bool, device: str) -> Iterator[Planned]:
    """The applicable cases of one check, each once."""
    have = subject.capabilities
    unclaimed = [name for name in check.claims if not have.declares(name)]
    if unclaimed:
        yield Planned(check, None, f"it does not claim {', '.join(unclaimed)}")
        return
    scope = Scope(
        have, quick, getattr(subject.probe, "family", ""), bool(getattr(subject.probe, "gates", {}))
    )
    seen: set[str] = set()
    lacking: list[str] = []
    for made in check.cases(scope):
        one = fitted(made, have.head_dims, device)
        missing = one.missing(have)
        if missing:
            lacking += missing
        elif one.id not in seen:
            seen.add(one.id)
            yield Planned(check, one)
    if not seen:
        needs = ", ".join(dict.fromkeys(lacking))
        yield Planned(
            check, None, f"it does not declare {needs}" if needs else "nothing of it applies to this variant"
        )
