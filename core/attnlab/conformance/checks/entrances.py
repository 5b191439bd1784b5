"""Refusals from every entrance, and unknown arguments. Needs torch.

A wrapper that drops what it does not understand (`**kwargs`, an overridden `__call__`, a forward pre-hook) answers another
question than the caller's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from attnlab.capabilities import ASKABLE
from attnlab.conformance.checks.refusals import REQUESTS, demand_refusal
from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.compare.messages import demand, where
from attnlab.conformance.oracle.cases import Case
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


def check_every_entry_point_refuses_undeclared_features(variant: Any, case: Case) -> None:
    """`forward` called by name, `attend()` and `MultiHeadAttention` refuse what `variant(...)` must refuse."""
    for request in _entrances(variant, draw(case, variant), case.note):
        demand_refusal(variant, case, case.note, request)


def _entrances(variant: Any, inputs: Inputs, feature: str) -> Iterable[Callable[[], Any]]:
    import attnlab

    case, tensors, more = inputs.case, (inputs.query, inputs.key, inputs.value), REQUESTS[feature](inputs)
    yield lambda: variant.forward(*tensors, **{**inputs.arguments, **more})
    if variant.parameter_free and _is_what_its_name_makes(variant, case):
        yield lambda: attnlab.attend(*tensors, variant=variant.name, **{**inputs.arguments, **more})
    if feature == "dropout":  # MultiHeadAttention takes it when it is made
        return
    width = variant.num_heads * variant.head_dim
    module = attnlab.MultiHeadAttention(width, variant.num_heads, variant=variant)
    module = module.to(inputs.query.device, inputs.query.dtype)
    x = inputs.query.new_zeros(case.batch, case.query_length, width)
    yield lambda: module(x, **more)


def _is_what_its_name_makes(variant: Any, case: Case) -> bool:
    """Whether `attend()` by its name calls one like it: an instance may have options that its registry row has not."""
    import attnlab

    if variant.name not in attnlab.default_registry():
        return False
    made = attnlab.create(variant.name, **case.geometry)
    return type(made) is type(variant) and made.options == variant.options


def check_unknown_arguments_are_rejected(variant: Any, case: Case) -> None:
    """An argument that the contract does not know raises a `TypeError`, or an error of attnlab's, that names it."""
    inputs, compare = drawn(case, variant)
    advice = "Leave the signature to Attention.forward"
    for name, value in UNKNOWN:
        try:
            inputs.answer(variant, **{name: value})
        except (TypeError, AttnlabError) as fault:
            told = f"the unknown argument {name} was rejected without its name: {fault}"
            compare.demand(name in str(fault), told, advice)
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: the unknown argument {name}: expected TypeError, got "
                f"{type(other).__name__}: {other}. {advice}"
            ) from other
        else:
            compare.fail(
                f"the unknown argument {name}={value!r} was accepted and dropped",
                "Take no **kwargs in __call__ or in a hook: an argument that nothing reads is an error, not a wish",
            )


def check_supports_gives_reasons_for_refusals(variant: Any, case: Case) -> None:
    """`supports(request)` gives a reason for each undeclared feature and none for a plain request, as tools that choose rely on it."""
    have = variant.capabilities
    sizes: dict[str, Any] = {
        "batch": case.batch,
        "num_heads": case.num_heads,
        "query_length": case.query_length,
        "head_dim": case.head_dim,
        "dtype": case.dtype,
        "device": case.device.split(":")[0],
    }
    required = [name for name in ("causal", "window") if getattr(variant.requires, name)]
    plain = _reasons(variant, case, Request.of(*required, **sizes, num_kv_heads=case.num_kv_heads))
    fault = f"supports() refuses a plain request: {'; '.join(map(str, plain))}"
    demand(not plain, variant, case, fault, "Serve a plain call in a declared dtype, or do not declare it")
    other: dict[str, dict[str, Any]] = {
        "gqa": {"num_heads": 4, "num_kv_heads": 2},
        "cross_lengths": {"key_length": case.key_length + 3},
        "value_dim": {"value_dim": case.value_dim + 3},
        "query_dim": {"key_dim": case.key_dim + 3},
        "state": {"past": 3},
    }
    for feature in ASKABLE:
        if not have.declares(feature):
            words = () if feature in other else (feature,)  # the others follow from sizes
            _demand_reason(variant, case, feature, Request.of(*words, **{**sizes, **other.get(feature, {})}))
    lacking = [f for f in ASKABLE if f in REQUESTS and not have.declares(f)]
    every = _reasons(variant, case, Request.of(*lacking, **sizes))
    missed = [f for f in lacking if f not in {reason.feature for reason in every}]
    fault = f"asked for {', '.join(lacking)} at once, supports() gives no reason for {', '.join(missed)}"
    advice = "List every reason, not the first one: who asks can then change all of them at once"
    demand(not missed, variant, case, fault, advice)
    for word, names in (("dtype", ("float64", "float16")), ("device", ("meta", "xpu"))):
        for name in names:
            if name not in getattr(have, f"{word}s"):
                _demand_reason(variant, case, word, Request.of(**{**sizes, word: name}))


def _demand_reason(variant: Any, case: Case, feature: str, request: Request) -> None:
    named = [reason.feature for reason in _reasons(variant, case, request)]
    reasons = "reasons for " + ", ".join(named) if named else "no reason"
    fault = f"supports() gives {reasons} where {feature} is asked and not declared"
    demand(feature in named, variant, case, fault, "Add to super().supports(request) rather than replacing it")


def _reasons(variant: Any, case: Case, request: Request) -> list[Any]:
    try:
        reasons: list[Any] = variant.supports(request)
    except Exception as fault:
        raise AssertionError(
            f"{where(variant, case)}: supports() raised {type(fault).__name__}: {fault}. It answers with a list of "
            "reasons, empty where the request is served"
        ) from fault
    right = isinstance(reasons, list) and all(hasattr(reason, "feature") for reason in reasons)
    told = f"supports() must return a list of Reason, got {re.sub(r'<.*>', '...', repr(reasons))[:80]}"
    demand(right, variant, case, told, "Return [] where the request is served")
    return reasons


def _undeclared(scope: Scope) -> Iterable[Case]:
    return [c for name in REQUESTS if not scope.capabilities.declares(name) for c in scope.cases("", note=name)]


def _one(scope: Scope) -> Iterable[Case]:
    return scope.cases("")


CHECKS = (
    Check(check_every_entry_point_refuses_undeclared_features, "refusals", _undeclared, random_too=True),
    Check(check_unknown_arguments_are_rejected, "refusals", _one, random_too=True),
    Check(check_supports_gives_reasons_for_refusals, "refusals", _one, random_too=True),
)
