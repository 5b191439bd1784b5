"""Constructors: sizes and options are kept, validated and honoured, and instances are their own. Needs torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._settings import deterministic_mode
from attnlab.conformance.compare.comparer import DEFINITION, Comparer, drawn, fail
from attnlab.conformance.compare.messages import demand, where
from attnlab.conformance.oracle.bounds import exact_and_bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import draw
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
        except (TypeError, AttnlabError) as refusal:
            fault = f"the unknown option {name} was rejected without its name: {refusal}"
            advice = "Leave unknown keywords to Python: take no **options that nothing reads"
            demand(name in str(refusal), variant, case, fault, advice)
        else:
            fault = f"the constructor accepts {name}=1, an option that it does not have, and drops it"
            advice = "Name every option in the signature; **kwargs may only go on to super().__init__"
            fail(variant, case, fault, advice)


def check_sizes_are_kept_and_validated(variant: Any, case: Case) -> None:
    """The instance has the sizes that it was created with, and impossible sizes are refused."""
    for name, size in case.geometry.items():
        own = getattr(variant, name, None)
        fault = f"it was made with {name}={size} and says {name}={own}"
        demand(own == size, variant, case, fault, "Hand every size on to super().__init__")
    few = {"num_heads": case.num_heads, "head_dim": case.head_dim}
    usual = {"num_kv_heads": case.num_heads, "key_dim": case.head_dim, "value_dim": case.head_dim}
    free = case.num_kv_heads == case.num_heads
    for words, more in (("left out", {}), ("None", dict.fromkeys(usual))):
        try:
            made = type(variant)(**few, **more, **variant.options)
        except AttnlabError:  # it needs another number of heads, say
            continue
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: with {', '.join(usual)} {words} it cannot be made: "
                f"{type(other).__name__}: {other}. Read sizes from self, after super().__init__ has settled them"
            ) from other
        sizes = {name: getattr(made, name) for name in usual}
        if not free:  # as one that has a single key/value head by design
            sizes["num_kv_heads"] = case.num_heads
        fault = f"with {', '.join(usual)} {words} it has {sizes}, expected {usual}"
        advice = "Key/value heads are as many as heads, keys as wide as queries, values as wide as keys"
        demand(sizes == usual, variant, case, fault, advice)
    bad: list[dict[str, Any]] = [{name: size} for name in case.geometry for size in (0, -1, 1.5, True)]
    advice = "with the sizes as they came: it validates them"
    for changes in [*bad, {"num_heads": 4, "num_kv_heads": 3}]:
        told = ", ".join(f"{n}={x!r}" for n, x in changes.items())
        try:
            type(variant)(**{**case.geometry, **changes}, **variant.options)
        except AttnlabError:
            continue
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: {told}: expected InvalidInput, got {type(other).__name__}: {other}. "
                f"Call super().__init__ first, {advice}"
            ) from other
        fail(variant, case, f"it can be made with {told}", f"Call super().__init__ {advice}")


def check_options_are_honoured(variant: Any, case: Case) -> None:
    """`options` holds every option; whatever value the constructor accepts, it is recorded and the definition agrees with it."""
    parameters = inspect.signature(type(variant).__init__).parameters.values()
    record = "self.options holds every option as it was given: copies and reports are made from it"
    for name in (p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)):
        known = name in ("self", *case.geometry, *variant.options)
        demand(known, variant, case, f"the constructor takes {name}, and self.options does not hold it", record)
    if not variant.options:
        raise NotApplicable("it has no options")
    for name, value in variant.options.items():
        for other in (*_other_values(value), *_other_words(variant, case, name)):
            options = {**variant.options, name: other}
            told = f"with {name}={other!r}"
            try:
                made = seeded(lambda **sizes: type(variant)(**sizes, **options), case)  # noqa: B023
            except (AttnlabError, ValueError, TypeError):  # it is validated, and refused
                continue
            made.name = variant.name
            own = made.options.get(name)
            demand(own == other, variant, case, f"it was made {told} and records {name}={own!r}", record)
            inputs = draw(replace(case, note=told), made)
            try:
                got = inputs.out(made)
                require_exact(made, inputs)
                exact, limit = exact_and_bound(made, inputs)
            except (UnsupportedRequest, NotApplicable):
                continue
            except Exception as fault:
                raise AssertionError(
                    f"{where(variant, inputs.case)}: the constructor accepts {name}={other!r}, and a call or the definition "
                    f"fails with {type(fault).__name__}: {fault}. Validate the value where it is given"
                ) from fault
            advice = (
                f"The option {name} is accepted and does not do what the formula says: honour it, or refuse its value"
            )
            Comparer(variant, inputs).close(got, exact, limit, DEFINITION, advice)


def check_instances_share_no_parameters(variant: Any, case: Case) -> None:
    """Parameters and buffers of one instance are its own: writing to them changes no other instance, made before or after."""
    inputs, compare = drawn(case, variant)
    before = like(variant).to(inputs.query.device, inputs.query.dtype).eval()
    expected = inputs.seeded_out(before)
    with torch.no_grad():
        for x in (*variant.parameters(), *variant.buffers()):
            if x.is_floating_point():
                x.add_(1.0)
    versus = "the same instance's before another instance's parameters were changed"
    advice = "Make parameters in __init__, and keep nothing on the class"
    compare.same(inputs.seeded_out(before), expected, versus, advice)


def check_parameters_are_initialised(variant: Any, case: Case) -> None:
    """Every parameter and buffer is finite when the instance is made, where memory that nobody wrote to holds NaN."""
    with deterministic_mode("warn"):  # torch.empty then fills what it hands out with NaN
        made = type(variant)(**case.geometry, **variant.options)
    for name, x in (*made.named_parameters(), *made.named_buffers()):
        unwritten = int((~x.isfinite()).sum()) if x.is_floating_point() else 0
        fault = f"{name} holds what memory held before: {unwritten} of {x.numel()} numbers were not written"
        demand(not unwritten, variant, case, fault, "Initialise every parameter in __init__, torch.empty does not")


def check_instances_do_not_change_their_class(variant: Any, case: Case) -> None:
    """Instances with other options leave the class and its instances as they were."""
    kind = type(variant)
    public = ("capabilities", "formula", "family", "gates", "conflicts", "known_failures", "definition", "golden")

    def attributes() -> dict[str, Any]:
        values = {name: getattr(kind, name) for name in public}
        return {name: dict(x) if isinstance(x, Mapping) else x for name, x in values.items()}

    before = attributes()
    have, options = variant.capabilities, dict(variant.options)
    others = [(name, x) for name, value in options.items() for x in _other_values(value)]
    for changed in ({}, *({name: x} for name, x in others)):
        with suppress(Exception):  # it is validated, and refused
            kind(**case.geometry, **{**options, **changed})
    after = attributes()
    for name, value in before.items():
        fault = f"making another instance changed {kind.__name__}.{name}"
        demand(after[name] == value, variant, case, fault, "Set it on self: use self.narrow(...), never type(self)")
    same = variant.capabilities == have and variant.options == options
    fault = "making another instance changed the capabilities or options of this one"
    demand(same, variant, case, fault, "Keep options and capabilities on self, and share no mutable default")


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3, 2 * value]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    return [f"{value}_no_such_value"] if isinstance(value, str) else []


def _other_words(variant: Any, case: Case, name: str) -> list[str]:
    """The words that an option could hold instead: those in the refusal of an unknown one, if there is one."""
    value = variant.options[name]
    if not isinstance(value, str):
        return []
    try:
        type(variant)(**case.geometry, **{**variant.options, name: f"{value}_no_such_value"})
    except Exception as refusal:
        words = re.findall(r"[\w-]+", str(refusal))
        return [word for word in dict.fromkeys(words) if word != value and "no_such_value" not in word]
    return []


def _one(scope: Scope) -> Iterable[Case]:
    return scope.cases("")


def _some(scope: Scope) -> Iterable[Case]:
    return scope.usable("", "causal+gqa+value_dim")


CHECKS = (
    Check(check_unknown_options_are_rejected, "refusals", _one, random_too=True),
    Check(check_sizes_are_kept_and_validated, "refusals", _some, random_too=True),
    Check(check_options_are_honoured, "modules", _some),
    Check(check_instances_share_no_parameters, "modules", _one, random_too=True),
    Check(check_parameters_are_initialised, "modules", _one, random_too=True),
    Check(check_instances_do_not_change_their_class, "modules", _one, random_too=True),
)
