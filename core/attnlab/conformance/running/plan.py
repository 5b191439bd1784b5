"""Which checks run on which cases for one variant: the one generator behind every entrance. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from attnlab.conformance.checks import ALL
from attnlab.conformance.oracle.cases import Case, fitted, meeting
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import Subject
from attnlab.errors import InvalidInput, nearest

QUICK_STEPS = 64  # tokens of a case for what walks token by token, in a quick run and apart from its plain values
QUICK = 64  # cases of one check in a quick run; refusals are asked for one by one all the same


RENAMED = {
    "large_scores_do_not_overflow": "agrees_with_definition",
    "special_contents_agree_with_definition": "agrees_with_definition",
    "extreme_arguments_agree_with_definition": "agrees_with_definition",
    "long_inputs_agree_with_definition": "agrees_with_definition",
    "any_size_agrees_with_definition": "agrees_with_definition",
    "long_gradients_match_definition": "gradients_match_definition",
    "any_size_gradients_match_definition": "gradients_match_definition",
    "long_sequences_may_be_split_anywhere": "chunked_decoding_equals_full_attention",
    "steps_return_weights_and_lse": "chunked_decoding_equals_full_attention",
}
"""Earlier names of checks, which `only` and `known_failures` may still use, and the check that asks what they asked."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A check and one case of it; without a case, `reason` says why the check does not apply."""

    check: Check
    case: Case | None
    reason: str = ""
    device: str = "cpu"

    @property
    def id(self) -> str:
        """The case's id, "" without a case."""
        return "" if self.case is None else self.case.id


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they run: attnlab's own, then those of plugins (hook `attnlab_checks`)."""
    from attnlab.hooks import plugin_manager

    return (*ALL, *plugin_manager().gather("attnlab_checks", _fault_of))


def _fault_of(item: Any) -> str:
    """Why what a plugin returns is no check that can run beside attnlab's own, "" where it is one."""
    if not isinstance(item, Check):
        return f"attnlab_checks must return attnlab.conformance.Check objects, got {type(item).__name__}"
    if item.name in {check.name for check in ALL}:
        return f"attnlab_checks: {item.name!r} is a check of attnlab itself; rename the function"
    return ""


def selected(only: str | Iterable[str] | None) -> list[Check]:
    """The checks that `only` names: check names, topics, or patterns with `*`; None means all.

    A word that matches nothing is `InvalidInput` with the nearest names.
    """
    checks = all_checks()
    if only is None:
        return list(checks)
    chosen: set[str] = set()
    for word in [only] if isinstance(only, str) else only:
        word = RENAMED.get(word, word)
        hits = {c.name for c in checks if fnmatchcase(c.name, word) or fnmatchcase(c.topic, word)}
        if not hits:
            known = {c.name for c in checks} | {c.topic for c in checks}
            raise InvalidInput(f"only: no check and no topic is called {word!r}; {nearest(word, known)}")
        chosen |= hits
    return [c for c in checks if c.name in chosen]


def _spread(cases: list[Case], most: int) -> list[Case]:
    """At most that many of the cases, evenly spread from the first to the last."""
    if len(cases) <= most:
        return cases
    return [cases[round(n * (len(cases) - 1) / (most - 1))] for n in range(most)]


def cases_of(check: Check, subject: Subject, *, quick: bool, device: str) -> Iterator[Planned]:
    """The applicable cases of one check, each once."""
    have = subject.capabilities
    required = subject.probe.requires
    if check.topic == "laws" and (required.causal or required.window):
        yield Planned(check, None, "its calls need a rule of positions, beside which no law of averages holds", device)
        return
    if off := check.switched_off(have):
        yield Planned(check, None, off, device)
        return
    if subject.random and not check.random_too:
        reason = "it is random by design, and this compares calls that draw different numbers"
        yield Planned(check, None, reason, device)
        return
    if check.slow and quick:
        yield Planned(check, None, "a quick run leaves it out", device)
        return
    family, gates = getattr(subject.probe, "family", ""), bool(getattr(subject.probe, "gates", {}))
    scope = Scope(have, quick, family, gates, subject.settings, subject.heads, subject.widest, required)
    fit: dict[str, Case] = {}  # by id, each once
    lacking: list[str] = []
    for made in check.cases(scope):
        one = meeting(fitted(made, have.head_dims, device, subject.heads), required)
        if one is None:
            continue
        able = subject.settings.get(one.options, have)
        missing = one.missing(able) or list(filter(None, [check.switched_off(able)]))
        if missing:
            lacking += missing
        else:
            fit.setdefault(one.id, one)
    cases = list(fit.values())
    if quick and scope.stepwise and check.topic not in ("values", "state"):
        cases = [one for one in cases if max(one.query_length, one.key_length) <= QUICK_STEPS]
    if quick and check.topic != "refusals":
        cases = _spread(cases, QUICK)
    yield from (Planned(check, one, device=device) for one in cases)
    if not cases:
        needs = ", ".join(dict.fromkeys(lacking))
        reason = f"it does not declare {needs}" if needs else "nothing of it applies to this variant"
        if quick and not needs and (fit or any(True for _ in check.cases(replace(scope, quick=False)))):
            reason = "a quick run leaves it out"
        yield Planned(check, None, reason, device)
