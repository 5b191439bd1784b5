"""Refusals from every entrance, and arguments that nobody knows. Needs torch.

A wrapper that drops what it does not understand (`**kwargs`, an overridden `__call__`, a forward pre-hook) answers a
question that was not asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from attnlab.capabilities import ASKABLE
from attnlab.conformance.checks.refusals import ASKED, demand_refusal
from attnlab.conformance.compare.messages import demand, where
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import AttnlabError
from attnlab.request import Request

UNKNOWN: tuple[tuple[str, Any], ...] = (
    ("attention_mask", None),
    ("attn_mask", None),
    ("is_causal", True),
    ("key_padding_mask", None),
    ("sliding_window", 3),
    ("scaling", 0.5),
    ("dropout", 0.1),
    ("training", False),
    ("enable_gqa", True),
    ("need_weight", True),  # a typing error
    ("output_attentions", True),
    ("anything_else", None),
)
"""Names that other libraries use, a typing error and one that nobody uses."""


def check_other_entrances_refuse_alike(variant: Any, case: Case) -> None:
    """`forward` called by name, `attend()` and `MultiHeadAttention` refuse what `variant(...)` must refuse."""
    feature = case.note
    inputs = draw(case, variant)
    asked = ASKED[feature](inputs)
    for ask in _entrances(variant, inputs, feature, asked):
        demand_refusal(variant, case, feature, ask)


def _entrances(variant: Any, inputs: Inputs, feature: str, asked: dict[str, Any]) -> Iterable[Callable[[], Any]]:
    tensors = (inputs.query, inputs.key, inputs.value)
    yield lambda: variant.forward(*tensors, **{**inputs.arguments, **asked})
    import attnlab

    if variant.parameter_free and _is_what_its_name_makes(variant, inputs.case):
        yield lambda: attnlab.attend(*tensors, variant=variant.name, **{**inputs.arguments, **asked})
    if feature == "dropout":  # MultiHeadAttention is told when it is made
        return
    case = inputs.case
    width = variant.num_heads * variant.head_dim
    module = attnlab.MultiHeadAttention(width, variant.num_heads, variant=variant)
    module = module.to(inputs.query.device, inputs.query.dtype)
    x = inputs.query.new_zeros(case.batch, case.query_length, width)
    yield lambda: module(x, **asked)


def _is_what_its_name_makes(variant: Any, case: Case) -> bool:
    """Whether `attend()` by its name calls one like it: an instance may have options that its registry row has not."""
    import attnlab

    if variant.name not in attnlab.default_registry():
        return False
    made = attnlab.create(variant.name, **case.geometry)
    return type(made) is type(variant) and made.options == variant.options


def check_unknown_arguments_are_rejected(variant: Any, case: Case) -> None:
    """An argument that the contract does not know raises a `TypeError`, or an error of attnlab's, that names it."""
    inputs = draw(case, variant)
    for name, value in UNKNOWN:
        try:
            with torch.no_grad():
                inputs.run(variant, **{name: value})
        except (TypeError, AttnlabError) as fault:
            demand(
                name in str(fault),
                variant,
                case,
                f"the unknown argument {name} was rejected without its name: {fault}",
                "Leave the signature to Attention.forward",
            )
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: the unknown argument {name}: expected TypeError, got "
                f"{type(other).__name__}: {other}. Leave the signature to Attention.forward"
            ) from other
        else:
            demand(
                False,
                variant,
                case,
                f"the unknown argument {name}={value!r} was accepted and dropped",
                "Take no **kwargs in __call__ or in a hook: an argument that nothing reads is an error, not a wish",
            )


def check_supports_names_what_is_refused(variant: Any, case: Case) -> None:
    """`supports(request)` gives a reason for each undeclared thing and none for a plain request, as tools that choose rely on it."""
    have = variant.capabilities
    sizes: dict[str, Any] = {
        "batch": case.batch,
        "num_heads": case.num_heads,
        "query_length": case.query_length,
        "head_dim": case.head_dim,
        "dtype": case.dtype,
        "device": case.device.split(":")[0],
    }
    plain = _reasons(variant, case, Request.of(**sizes, num_kv_heads=case.num_kv_heads))
    demand(
        not plain,
        variant,
        case,
        f"supports() refuses a plain request: {'; '.join(map(str, plain))}",
        "Serve a plain call in a declared dtype, or do not declare it",
    )
    for feature in ASKABLE:
        if have.declares(feature) or feature in ("gqa", "cross_lengths", "value_dim", "query_dim", "state"):
            continue  # the latter follow from sizes, below
        _demand_reason(variant, case, feature, Request.of(feature, **sizes))
    other: dict[str, dict[str, Any]] = {
        "gqa": {"num_heads": 4, "num_kv_heads": 2},
        "cross_lengths": {"key_length": case.key_length + 3},
        "value_dim": {"value_dim": case.value_dim + 3},
        "query_dim": {"key_dim": case.key_dim + 3},
        "state": {"past": 3},
    }
    for feature, more in other.items():
        if not have.declares(feature):
            _demand_reason(variant, case, feature, Request.of(**{**sizes, **more}))
    lacking = [f for f in ASKABLE if f in ASKED and not have.declares(f)]
    every = _reasons(variant, case, Request.of(*lacking, **sizes))
    missed = [f for f in lacking if f not in {reason.feature for reason in every}]
    demand(
        not missed,
        variant,
        case,
        f"asked for {', '.join(lacking)} at once, supports() gives no reason for {', '.join(missed)}",
        "List every reason, not the first one: who asks can then change all of them at once",
    )
    for word, names in (("dtype", have.dtypes), ("device", have.devices)):
        for name in {"dtype": ("float64", "float16"), "device": ("meta", "xpu")}[word]:
            if name not in names:
                _demand_reason(variant, case, word, Request.of(**{**sizes, word: name}))


def _demand_reason(variant: Any, case: Case, feature: str, request: Request) -> None:
    named = [reason.feature for reason in _reasons(variant, case, request)]
    demand(
        feature in named,
        variant,
        case,
        f"supports() gives {'reasons for ' + ', '.join(named) if named else 'no reason'} where {feature} is asked and not declared",
        "Add to super().supports(request) rather than replacing it",
    )


def _reasons(variant: Any, case: Case, request: Request) -> list[Any]:
    try:
        found = variant.supports(request)
    except Exception as fault:
        raise AssertionError(
            f"{where(variant, case)}: supports() raised {type(fault).__name__}: {fault}. It answers with a list of "
            "reasons, empty where the request is served"
        ) from fault
    demand(
        isinstance(found, list) and all(hasattr(reason, "feature") for reason in found),
        variant,
        case,
        f"supports() must return a list of Reason, got {re.sub(r'<.*>', '...', repr(found))[:80]}",
        "Return [] where the request is served",
    )
    reasons: list[Any] = found
    return reasons


def _undeclared(scope: Scope) -> Iterable[Case]:
    for feature in ASKED:
        if not scope.capabilities.declares(feature):
            yield case(note=feature, dtype=scope.base)


def _one(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)


CHECKS = (
    Check(check_other_entrances_refuse_alike, "refusals", _undeclared, random_too=True),
    Check(check_unknown_arguments_are_rejected, "refusals", _one, random_too=True),
    Check(check_supports_names_what_is_refused, "refusals", _one, random_too=True),
)
