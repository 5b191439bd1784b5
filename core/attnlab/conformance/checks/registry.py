"""The registry row, the class and its claims agree. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnlab.capabilities import DEVICES, DTYPES
from attnlab.conformance.compare.comparer import fail
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import GEOMETRY, Case
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_registry_row_agrees_with_class(variant: Any, case: Case) -> None:
    """Family, formula, capabilities, dtypes and devices of the row are those of the class."""
    import attnlab

    registry = attnlab.default_registry()
    if variant.name not in registry:
        raise NotApplicable("it is not registered: there is no row to compare with")
    row, cls = registry.info(variant.name), type(variant)
    as_listed = registry.create(variant.name, **{name: getattr(variant, name) for name in GEOMETRY})
    if as_listed.options != variant.options:
        raise NotApplicable("it was made with other options than its row's")
    # A preset's options may narrow an instance, so the row states what this instance can do: on any machine, that is on a CPU.
    have = variant.capabilities_on("cpu")
    facts: dict[str, tuple[Any, Any]] = {
        "family": (row.family, cls.family),
        "formula": (row.formula, cls.formula),
        "capabilities": (_sorted(row.capabilities), sorted(have.declared())),
        "dtypes": (_sorted(row.dtypes), sorted(have.dtypes)),
        "devices": (_sorted(row.devices), sorted(have.devices)),
    }
    for fact, (stated, real) in facts.items():
        if not stated or stated == real:  # a fact may be left out of a row
            continue
        extra = ""
        if isinstance(stated, list):
            only_row, only_class = sorted(set(stated) - set(real)), sorted(set(real) - set(stated))
            extra = f" (only in the row: {only_row}; only in the class: {only_class})"
        fault = f"the row in {row.file} states {fact} {stated}, the class has {real}{extra}"
        fail(variant, case, fault, "Correct the row: listings trust it without running code")


def check_claims_are_consistent(variant: Any, case: Case) -> None:
    """The instance only narrows its class, and every claim has what it rests on."""
    have = variant.capabilities
    wider = have.within(type(variant).capabilities)
    unspecified = have.gates and not variant.gates
    baseless = have.double_backward and not have.backward
    for wrong, fault, advice in (
        (
            wider,
            f"the instance claims {', '.join(wider)}, which its class does not",
            "The class states the ceiling; __init__ may only narrow",
        ),
        (not have.dtypes & set(DTYPES), "no dtype is declared", f"Declare some of {', '.join(DTYPES)}"),
        (not have.devices & set(DEVICES), "no device is declared", "Declare cpu, cuda, ..."),
        (unspecified, "gates are declared and none is specified", 'Name them: gates = {"beta": GateSpec(...)}'),
        (variant.gates and not have.gates, "gates are specified and not declared", "Declare gates=True"),
        (baseless, "double_backward is claimed without backward", "Declare backward"),
    ):
        demand(not wrong, variant, case, fault, advice)


def _sorted(names: Iterable[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def _one(scope: Scope) -> Iterable[Case]:
    return scope.cases("")


CHECKS = (
    Check(check_registry_row_agrees_with_class, "registry", _one, random_too=True),
    Check(check_claims_are_consistent, "registry", _one, random_too=True),
)
