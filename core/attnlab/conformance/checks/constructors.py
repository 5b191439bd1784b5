"""Constructors: sizes and options are kept, judged and honoured, and instances are their own. Needs torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._runs import agree, declared, plainly
from attnlab.conformance.compare.messages import demand, demand_close, where
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import draw, exact_and_bound
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.conformance.running.subject import like, seeded
from attnlab.errors import AttnlabError, UnsupportedRequest

UNKNOWN = "no_such_option"


def check_unknown_options_are_rejected(variant: Any, case: Case) -> None:
    """An option that the class does not have, or nearly has, raises a `TypeError` or an error of attnlab's that names it."""
    names = [UNKNOWN, *(f"{name}s" for name in variant.options if f"{name}s" not in variant.options)]
    for name in names:
        try:
            type(variant)(**case.geometry, **{**variant.options, name: 1})
        except (TypeError, AttnlabError) as fault:
            demand(
                name in str(fault),
                variant,
                case,
                f"the unknown option {name} was rejected without its name: {fault}",
                "Leave unknown keywords to Python: take no **options that nothing reads",
            )
        else:
            demand(
                False,
                variant,
                case,
                f"the constructor accepts {name}=1, an option that it does not have, and drops it",
                "Name every option in the signature; **kwargs may only go on to super().__init__",
            )


def check_sizes_are_kept_and_judged(variant: Any, case: Case) -> None:
    """The instance has the sizes that it was asked for, and impossible sizes are refused."""
    for name, asked in case.geometry.items():
        kept = getattr(variant, name, None)
        demand(
            kept == asked,
            variant,
            case,
            f"it was made with {name}={asked} and says {name}={kept}",
            "Hand every size on to super().__init__",
        )
    few = {"num_heads": case.num_heads, "head_dim": case.head_dim}
    usual = {"num_kv_heads": case.num_heads, "key_dim": case.head_dim, "value_dim": case.head_dim}
    free = case.num_kv_heads == case.num_heads
    for word, given in (("left out", {}), ("None", dict.fromkeys(usual))):
        try:
            made = type(variant)(**few, **given, **variant.options)
        except AttnlabError:  # it needs another number of heads, say
            continue
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: with {', '.join(usual)} {word} it cannot be made: "
                f"{type(other).__name__}: {other}. Read sizes from self, after super().__init__ has settled them"
            ) from other
        kept = {name: getattr(made, name) for name in usual}
        if not free:  # as one that has a single key/value head by design
            kept["num_kv_heads"] = case.num_heads
        demand(
            kept == usual,
            variant,
            case,
            f"with {', '.join(usual)} {word} it has {kept}, expected {usual}",
            "Key/value heads are as many as heads, keys as wide as queries, values as wide as keys",
        )
    bad: list[dict[str, Any]] = [{name: size} for name in case.geometry for size in (0, -1, 1.5, True)]
    bad.append({"num_heads": 4, "num_kv_heads": 3})
    for sizes in bad:
        told = ", ".join(f"{n}={x!r}" for n, x in sizes.items())
        try:
            type(variant)(**{**case.geometry, **sizes}, **variant.options)
        except AttnlabError:
            continue
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: {told}: expected InvalidInput, got {type(other).__name__}: {other}. "
                "Call super().__init__ first, with the sizes as they came: it judges them"
            ) from other
        demand(
            False,
            variant,
            case,
            f"it can be made with {told}",
            "Call super().__init__ with the sizes as they came: it judges them",
        )


def check_options_are_honoured(variant: Any, case: Case) -> None:
    """`options` holds every option; whatever value the constructor accepts, it is recorded and the definition agrees with it."""
    taken = inspect.signature(type(variant).__init__).parameters.values()
    for name in (p.name for p in taken if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)):
        demand(
            name in ("self", *case.geometry, *variant.options),
            variant,
            case,
            f"the constructor takes {name}, and self.options does not hold it",
            "self.options holds every option as it was given: copies and reports are made from it",
        )
    if not variant.options:
        raise NotApplicable("it has no options")
    for name, value in variant.options.items():
        for other in (*_other_values(value), *_other_words(variant, case, name)):
            options = {**variant.options, name: other}
            told = f"with {name}={other!r}"
            try:
                made = seeded(lambda **sizes: type(variant)(**sizes, **options), case)  # noqa: B023
            except (AttnlabError, ValueError, TypeError):  # it is judged, and refused
                continue
            made.name = variant.name
            demand(
                made.options.get(name) == other,
                variant,
                case,
                f"it was made {told} and records {name}={made.options.get(name)!r}",
                "self.options holds the options as they were given: copies and reports are made from it",
            )
            inputs = draw(replace(case, note=told), made)
            try:
                with torch.no_grad():
                    got = inputs.run(made).out
                require_exact(made, inputs)
                exact, limit = exact_and_bound(made, inputs)
            except (UnsupportedRequest, NotApplicable):
                continue
            except Exception as fault:
                raise AssertionError(
                    f"{where(variant, inputs.case)}: the constructor accepts {name}={other!r}, and a call or the definition "
                    f"fails with {type(fault).__name__}: {fault}. Judge the value where it is given"
                ) from fault
            demand_close(
                got,
                exact,
                limit,
                variant,
                inputs.case,
                what="out",
                versus="the float64 definition",
                advice=f"The option {name} is accepted and does not do what the formula says: honour it, or refuse its value",
            )


def check_instances_are_their_own(variant: Any, case: Case) -> None:
    """Parameters and buffers of one instance are its own: writing to them changes no other instance, made before or after."""
    inputs = draw(case, variant)
    before = like(variant).to(inputs.query.device, inputs.query.dtype).eval()
    expected = plainly(before, inputs)
    with torch.no_grad():
        for x in (*variant.parameters(), *variant.buffers()):
            if x.is_floating_point():
                x.add_(1.0)
    agree(
        variant,
        inputs,
        plainly(before, inputs),
        expected,
        versus="the same instance's before another instance's parameters were changed",
        advice="Make parameters in __init__, and keep nothing on the class",
    )


def check_parameters_are_initialised(variant: Any, case: Case) -> None:
    """Every parameter and buffer is finite when the instance is made, where memory that nobody wrote to holds NaN."""
    was = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode("warn")  # torch.empty then fills what it hands out with NaN
        made = type(variant)(**case.geometry, **variant.options)
    finally:
        torch.set_deterministic_debug_mode(was)
    for name, x in (*made.named_parameters(), *made.named_buffers()):
        demand(
            not x.is_floating_point() or bool(x.isfinite().all()),
            variant,
            case,
            f"{name} holds what memory held before: {int((~x.isfinite()).sum())} of {x.numel()} numbers were not written",
            "Initialise every parameter in __init__, torch.empty does not",
        )


def check_making_one_changes_no_other(variant: Any, case: Case) -> None:
    """Instances with other options leave the class and its instances as they were."""
    kind = type(variant)
    public = ("capabilities", "formula", "family", "gates", "conflicts", "known_failures", "definition", "golden")

    def attributes() -> dict[str, Any]:
        found = {name: getattr(kind, name) for name in public}
        return {name: dict(x) if isinstance(x, Mapping) else x for name, x in found.items()}

    before = attributes()
    have, options = variant.capabilities, dict(variant.options)
    others = [(name, x) for name, value in options.items() for x in _other_values(value)]
    for changed in ({}, *({name: x} for name, x in others)):
        with suppress(Exception):  # it is judged, and refused
            kind(**case.geometry, **{**options, **changed})
    after = attributes()
    for name, value in before.items():
        demand(
            after[name] == value,
            variant,
            case,
            f"making another instance changed {kind.__name__}.{name}",
            "Set it on self: use self.narrow(...), never type(self)",
        )
    demand(
        variant.capabilities == have and variant.options == options,
        variant,
        case,
        "making another instance changed the capabilities or options of this one",
        "Keep options and capabilities on self, and share no mutable default",
    )


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3, 2 * value]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    return [f"{value}_no_such_value"] if isinstance(value, str) else []


def _other_words(variant: Any, case: Case, name: str) -> list[str]:
    """The words that an option could hold instead: those that the refusal of an unknown one tells, if it is given one."""
    value = variant.options[name]
    if not isinstance(value, str):
        return []
    try:
        type(variant)(**case.geometry, **{**variant.options, name: f"{value}_no_such_value"})
    except Exception as refusal:
        told = re.findall(r"[\w-]+", str(refusal))
        return [word for word in dict.fromkeys(told) if word != value and "no_such_value" not in word]
    return []


def _one(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)


def _some(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case(*declared(scope, "causal", "gqa", "value_dim"), dtype=scope.base)


CHECKS = (
    Check(check_unknown_options_are_rejected, "refusals", _one, random_too=True),
    Check(check_sizes_are_kept_and_judged, "refusals", _some, random_too=True),
    Check(check_options_are_honoured, "modules", _some),
    Check(check_instances_are_their_own, "modules", _one, random_too=True),
    Check(check_parameters_are_initialised, "modules", _one, random_too=True),
    Check(check_making_one_changes_no_other, "modules", _one, random_too=True),
)
