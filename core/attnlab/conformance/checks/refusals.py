"""Features that are not declared are refused, with a reason, before any tensor work. Needs torch.

One case per undeclared askable; a variant that quietly accepts one fails, and the message names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE, DTYPES
from attnlab.conformance.checks._watching import Watch
from attnlab.conformance.compare.comparer import drawn, fail
from attnlab.conformance.compare.messages import demand, where
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.visibility import AttentionMask

# The arguments that request each askable of a call, made from plain inputs.
REQUESTS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "causal": lambda x: {"causal": True},
    "window": lambda x: {"window": (2, 1)},
    "key_mask": lambda x: {"key_mask": torch.ones(x.key.shape[0], x.key.shape[2], device=x.key.device).bool()},
    "mask": lambda x: {"mask": torch.ones(x.query.shape[2], x.key.shape[2], device=x.key.device).bool()},
    "segments": lambda x: {"segments": tuple(t.new_zeros(t.shape[0], t.shape[2]).long() for t in (x.query, x.key))},
    "mask_mod": lambda x: {"mask_mod": lambda b, h, q, k: q >= k},
    "score_mod": lambda x: {"score_mod": lambda score, b, h, q, k: score},
    "bias": lambda x: {"bias": x.query.new_zeros(1, 1, x.query.shape[2], x.key.shape[2])},
    "softcap": lambda x: {"softcap": 5.0},
    "sinks": lambda x: {"sinks": x.query.new_zeros(x.query.shape[1])},
    "scale": lambda x: {"scale": 0.5},
    "gates": lambda x: {"gates": {"beta": x.key.new_ones(x.key.shape[:3])}},
    "dropout": lambda x: {"dropout_p": 0.5},
    "weights": lambda x: {"need_weights": True},
    "lse": lambda x: {"need_lse": True},
}
SIZES: dict[str, dict[str, int]] = {
    "gqa": {"num_heads": 4, "num_kv_heads": 2},
    "value_dim": {"value_dim": 5},
    "query_dim": {"head_dim": 6},
}


def check_undeclared_features_are_refused(variant: Any, case: Case) -> None:
    """A request for an undeclared askable raises `UnsupportedRequest` with a reason that names it."""
    inputs = draw(case, variant)
    with torch.enable_grad():
        demand_refusal(variant, case, case.note.split(" ")[0], lambda: _request(variant, inputs, case.note))


def _request(variant: Any, inputs: Inputs, feature: str) -> None:
    """Request the feature, at creation or in a call: an argument, a size, a dtype or a device."""
    if feature in SIZES:
        like(variant, **{"key_dim": variant.key_dim, "value_dim": variant.value_dim, **SIZES[feature]})
    elif feature == "head_dims":
        legal = variant.capabilities.head_dims
        width = next(d for d in range(1, max(legal) + 2) if d not in legal)
        like(variant, head_dim=width, key_dim=width, value_dim=width)
    elif feature == "state":
        state = variant.init_state(inputs.case.batch, device=inputs.case.device, dtype=inputs.key.dtype)
        inputs.run(variant, state=state)
    elif feature == "cross_lengths":
        _counted(variant, inputs.changed(lambda x: x[:, :, :3], "query"))
    elif feature == "backward":
        _counted(variant, inputs.with_tensors(query=inputs.query.clone().requires_grad_()))
    elif feature.startswith("dtype "):
        dtype = getattr(torch, feature.removeprefix("dtype "))
        _counted(variant, inputs.changed(lambda x: x.to(dtype)))
    elif feature == "device meta":
        _counted(variant.to("meta"), inputs.changed(lambda x: x.to("meta")))
    else:
        _counted(variant, inputs, **REQUESTS[feature](inputs))


def _bools(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


# Arguments that have no meaning, by the askables that they are wrong about: query, key -> what is wrong -> arguments.
BAD: dict[str, Callable[[Tensor, Tensor], dict[str, dict[str, Any]]]] = {
    "mask": lambda q, k: {
        "mask with three axes": {"mask": _bools(q.shape[0], q.shape[2], k.shape[2])},
        "mask with one axis": {"mask": _bools(k.shape[2])},
        "mask of floats": {"mask": q.new_zeros(q.shape[2], k.shape[2])},
        "mask of another length": {"mask": _bools(q.shape[2], k.shape[2] + 1)},
        "mask of other heads": {"mask": _bools(1, q.shape[1] + 1, q.shape[2], k.shape[2])},
        "mask that is a list": {"mask": [[True]]},
    },
    "key_mask": lambda q, k: {
        "key_mask of integers": {"key_mask": torch.ones(q.shape[0], k.shape[2], dtype=torch.int64)},
        "key_mask with four axes": {"key_mask": _bools(q.shape[0], 1, 1, k.shape[2])},
        "key_mask of another length": {"key_mask": _bools(q.shape[0], k.shape[2] - 1)},
        "key_lengths of floats": {"key_lengths": q.new_ones(q.shape[0])},
        "key_lengths with two axes": {"key_lengths": torch.ones(q.shape[0], 1, dtype=torch.int64)},
    },
    "causal": lambda q, k: {
        "offset that is no word": {"causal": True, "offset": "bottom-right"},
        "offset of floats": {"causal": True, "offset": q.new_zeros(q.shape[0])},
        "causal that is a word": {"causal": "bottom_right"},
    },
    "causal+mask": lambda q, k: {"causal said twice": {"causal": True, "mask": AttentionMask(causal=True)}},
    "window": lambda q, k: {
        "negative window": {"window": (-1, 0)},
        "window of one number": {"window": (3,)},
        "window that is a number": {"window": 3},
        "window of fractions": {"window": (1.5, 0)},
    },
    "segments": lambda q, k: {
        "segments of one tensor": {"segments": torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64)},
        "segments of floats": {"segments": (q[:, 0, :, 0], k[:, 0, :, 0])},
    },
    "mask_mod": lambda q, k: {"mask_mod that is no function": {"mask_mod": True}},
    "score_mod": lambda q, k: {"score_mod that is no function": {"score_mod": 1.0}},
    "bias": lambda q, k: {
        "bias that does not broadcast": {"bias": q.new_zeros(1, 1, q.shape[2], k.shape[2] + 1)},
        "bias with three axes": {"bias": q.new_zeros(q.shape[1], q.shape[2], k.shape[2])},
        "bias of bools": {"bias": _bools(1, 1, q.shape[2], k.shape[2])},
    },
    "softcap": lambda q, k: {
        "softcap of 0": {"softcap": 0.0},
        "negative softcap": {"softcap": -5.0},
        "softcap that is a tensor": {"softcap": q.new_ones(())},
    },
    "scale": lambda q, k: {
        "scale that is NaN": {"scale": float("nan")},
        "scale that is a word": {"scale": "default"},
        "scale that is a tensor": {"scale": q.new_ones(q.shape[1])},
    },
    "sinks": lambda q, k: {
        "sinks of another number": {"sinks": q.new_zeros(q.shape[1] + 1)},
        "sinks with two axes": {"sinks": q.new_zeros(1, q.shape[1])},
    },
    "dropout": lambda q, k: {
        "dropout_p above 1": {"dropout_p": 1.5},
        "negative dropout_p": {"dropout_p": -0.1},
        "dropout_p that is a flag": {"dropout_p": True},
    },
    "weights": lambda q, k: {"need_weights that is a word": {"need_weights": "all"}},
    "lse": lambda q, k: {"need_lse that is a number": {"need_lse": 1}},
    "gates": lambda q, k: {
        "no gates": {"gates": None},
        "gates of another name": {"gates": {"no_such_gate": q.new_ones(k.shape[:3])}},
    },
    "state": lambda q, k: {"state that is a tuple": {"state": (k, k)}},
}


def check_bad_inputs_are_invalid(variant: Any, case: Case) -> None:
    """Wrong shapes, dtypes and ranges raise `InvalidInput` with one sentence, never another error or a result."""
    inputs, compare = drawn(case, variant)
    have = variant.capabilities
    q, k, v = inputs.query, inputs.key, inputs.value
    bad: list[tuple[str, dict[str, Any]]] = [
        ("query with three axes", {"query": q[0]}),
        ("key of another batch size", {"key": k[:1], "value": v[:1]}),
        ("value of another length", {"value": v[:, :, :-1]}),
        ("one query head too many", {"query": torch.cat([q, q[:, :1]], 1)}),
        ("key of another width", {"key": k[..., :-1]}),
        ("key of another dtype", {"key": k.to(torch.complex64)}),
    ]
    for feature, make in BAD.items():
        if all(have.declares(name) for name in feature.split("+")):
            bad += make(q, k).items()
    if have.causal and have.cross_lengths and not variant.requires.equal_lengths:
        bad += [("causal at two lengths without offset", {"query": q[:, :, :3], "causal": True, "offset": None})]
    for words, changes in bad:
        try:
            inputs.with_tensors(**changes).answer(variant)
        except InvalidInput as fault:
            _demand_whole_sentence(variant, case, words, fault)
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: {words}: expected InvalidInput, got {type(other).__name__}: {other}. "
                "Validate shapes before computing; Attention.forward does"
            ) from other
        else:
            compare.fail(f"{words} was accepted", "It has no meaning: raise InvalidInput")


def _counted(variant: Any, inputs: Inputs, **more: Any) -> None:
    """The call; a refusal of it must come before any tensor operation."""
    mode = Watch()
    try:
        with mode:
            inputs.run(variant, **more)
    except UnsupportedRequest:
        if mode.count:
            raise AssertionError(
                f"{where(variant, inputs.case)}: the refusal came after {mode.count} tensor operations; "
                "refuse from the Request alone, in Attention.forward or in supports()"
            ) from None
        raise


def demand_refusal(variant: Any, case: Case, feature: str, request: Callable[[], Any]) -> None:
    """Fail unless `request` raises `UnsupportedRequest` with a reason that names the feature."""
    form = ASKABLE.get(feature, case.note)
    try:
        request()
    except UnsupportedRequest as refusal:
        named = [r.feature for r in refusal.reasons]
        demand(
            feature in named or (not named and feature.split("_")[0] in str(refusal)),
            variant,
            case,
            f"{feature} was refused, but the reasons name {', '.join(named) or 'nothing'}: {refusal}",
            "List a Reason for each undeclared thing",
        )
        _demand_whole_sentence(variant, case, feature, refusal)
        return
    except AssertionError:
        raise
    except Exception as other:
        raise AssertionError(
            f"{where(variant, case)}: {form} is not declared: expected UnsupportedRequest, got "
            f"{type(other).__name__}: {other}. Let Attention.forward refuse it"
        ) from other
    advice = (
        f"Declare {feature} in `capabilities` and honour it, or let Attention.forward refuse it: no argument is dropped"
    )
    fail(variant, case, f"{form} was accepted although `{feature}` is not declared", advice)


def _demand_whole_sentence(variant: Any, case: Case, words: str, fault: Exception) -> None:
    text = str(fault)
    # A constructor may not know yet under which registered name it was called.
    names = {str(variant.name), str(type(variant).name), type(variant).__name__} - {""}
    whole = len(text) > 20 and "\n" not in text and any(name in text for name in names)
    told = f"the message for {words!r} must be one line that names {variant.name!r}, got {text!r}"
    demand(whole, variant, case, told, "A message: subject, expected, got, what to do")


def _undeclared(scope: Scope) -> Iterable[Case]:
    have = scope.capabilities
    notes = [feature for feature in ASKABLE if not have.declares(feature)]
    notes += ["head_dims"] if have.head_dims is not None and len(have.head_dims) else []
    notes += [f"dtype {dtype}" for dtype in DTYPES if dtype not in have.dtypes]
    notes += [] if "meta" in have.devices else ["device meta"]
    return [c for note in notes for c in scope.cases("", note=note)]


def _plain(scope: Scope) -> Iterable[Case]:
    return scope.cases("", "gqa")


CHECKS = (
    Check(check_undeclared_features_are_refused, "refusals", _undeclared, random_too=True),
    Check(check_bad_inputs_are_invalid, "refusals", _plain, random_too=True),
)
