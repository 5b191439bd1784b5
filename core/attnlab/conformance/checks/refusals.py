"""What is not declared is refused, with a reason, before any tensor work. Needs torch.

One case per undeclared askable; a variant that quietly accepts one fails, and the message names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE, DTYPES
from attnlab.conformance.checks._watching import Watch
from attnlab.conformance.compare.messages import demand, where
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.visibility import AttentionMask

# How each askable of a call is asked for: the arguments, made from plain inputs.
ASKED: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "causal": lambda x: {"causal": True},
    "window": lambda x: {"window": (2, 1)},
    "key_mask": lambda x: {
        "key_mask": torch.ones(x.key.shape[0], x.key.shape[2], dtype=torch.bool, device=x.key.device)
    },
    "mask": lambda x: {"mask": torch.ones(x.query.shape[2], x.key.shape[2], dtype=torch.bool, device=x.key.device)},
    "segments": lambda x: {"segments": (_zeros(x.query), _zeros(x.key))},
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


def check_refuses_what_it_does_not_declare(variant: Any, case: Case) -> None:
    """Asking for an undeclared askable raises `UnsupportedRequest` with a reason that names it."""
    feature = case.note
    inputs = draw(case, variant)
    if feature in SIZES:
        demand_refusal(variant, case, feature, lambda: _resized(variant, SIZES[feature]))
        return
    if feature == "head_dims":
        size = _illegal_width(variant.capabilities.head_dims)
        widths = {"head_dim": size, "key_dim": size, "value_dim": size}
        demand_refusal(variant, case, feature, lambda: like(variant, **widths))
        return
    if feature == "state":
        demand_refusal(
            variant,
            case,
            feature,
            lambda: inputs.run(
                variant, state=variant.init_state(case.batch, device=case.device, dtype=inputs.key.dtype)
            ),
        )
        return
    if feature == "cross_lengths":
        short = inputs.with_tensors(query=inputs.query[:, :, :3])
        demand_refusal(variant, case, feature, lambda: _counted(variant, short, {}))
        return
    if feature == "backward":
        recorded = inputs.with_tensors(query=inputs.query.clone().requires_grad_())
        with torch.enable_grad():
            demand_refusal(variant, case, feature, lambda: _counted(variant, recorded, {}))
        return
    if feature.startswith("dtype "):
        dtype = getattr(torch, feature.removeprefix("dtype "))
        cast = inputs.rebuilt({n: x.to(dtype) for n, x in inputs.tensors().items()})
        demand_refusal(variant, case, "dtype", lambda: _counted(variant, cast, {}))
        return
    if feature == "device meta":
        moved = inputs.rebuilt({n: x.to("meta") for n, x in inputs.tensors().items()})
        demand_refusal(variant, case, "device", lambda: _counted(variant.to("meta"), moved, {}))
        return
    demand_refusal(variant, case, feature, lambda: _counted(variant, inputs, ASKED[feature](inputs)))


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
    inputs = draw(case, variant)
    have = variant.capabilities
    q, k, v = inputs.query, inputs.key, inputs.value
    bad: list[tuple[str, Inputs, dict[str, Any]]] = [
        ("query with three axes", inputs.with_tensors(query=q[0]), {}),
        ("key of another batch size", inputs.with_tensors(key=k[:1], value=v[:1]), {}),
        ("value of another length", inputs.with_tensors(value=v[:, :, :-1]), {}),
        ("one query head too many", inputs.with_tensors(query=torch.cat([q, q[:, :1]], 1)), {}),
        ("key of another width", inputs.with_tensors(key=k[..., :-1]), {}),
        ("key of another dtype", inputs.with_tensors(key=k.to(torch.complex64)), {}),
    ]
    for feature, make in BAD.items():
        if all(have.declares(name) for name in feature.split("+")):
            bad += [(word, inputs, more) for word, more in make(q, k).items()]
    if have.causal and have.cross_lengths:
        short = inputs.with_tensors(query=q[:, :, :3])
        bad += [("causal at two lengths without offset", short, {"causal": True})]
    for word, changed, more in bad:
        try:
            with torch.no_grad():
                changed.run(variant, **more)
        except InvalidInput as fault:
            _whole_sentence(variant, case, word, fault)
        except Exception as other:
            raise AssertionError(
                f"{where(variant, case)}: {word}: expected InvalidInput, got {type(other).__name__}: {other}. "
                "Judge shapes before computing; the gate of Attention.forward does"
            ) from other
        else:
            demand(False, variant, case, f"{word} was accepted", "It has no meaning: raise InvalidInput")


def _counted(variant: Any, inputs: Inputs, more: dict[str, Any]) -> None:
    mode = Watch()
    try:
        with mode:
            inputs.run(variant, **more)
    except UnsupportedRequest:
        if mode.count:
            raise AssertionError(
                f"{where(variant, inputs.case)}: the refusal came after {mode.count} tensor operations; "
                "refuse from the Request alone, in the gate or in supports()"
            ) from None
        raise


def demand_refusal(variant: Any, case: Case, feature: str, ask: Callable[[], Any]) -> None:
    """Fail unless `ask` raises `UnsupportedRequest` with a reason that names the feature."""
    form = ASKABLE.get(feature, case.note)
    try:
        ask()
    except UnsupportedRequest as refusal:
        named = [r.feature for r in refusal.reasons]
        demand(
            feature in named or (not named and feature.split("_")[0] in str(refusal)),
            variant,
            case,
            f"{feature} was refused, but the reasons name {', '.join(named) or 'nothing'}: {refusal}",
            "List a Reason for each undeclared thing",
        )
        _whole_sentence(variant, case, feature, refusal)
        return
    except AssertionError:
        raise
    except Exception as other:
        raise AssertionError(
            f"{where(variant, case)}: {form} is not declared: expected UnsupportedRequest, got "
            f"{type(other).__name__}: {other}. Let the gate of Attention.forward refuse it"
        ) from other
    demand(
        False,
        variant,
        case,
        f"{form} was accepted although `{feature}` is not declared",
        f"Declare {feature} in `capabilities` and honour it, or leave its refusal to the gate: no argument is dropped",
    )


def _whole_sentence(variant: Any, case: Case, word: str, fault: Exception) -> None:
    text = str(fault)
    # A constructor may not know yet under which registered name it was called.
    names = {str(variant.name), str(type(variant).name), type(variant).__name__} - {""}
    demand(
        len(text) > 20 and "\n" not in text and any(name in text for name in names),
        variant,
        case,
        f"the message for {word!r} must be one line that names {variant.name!r}, got {text!r}",
        "A message: subject, expected, got, what to do",
    )


def _resized(variant: Any, sizes: dict[str, int]) -> None:
    base = {"key_dim": variant.key_dim, "value_dim": variant.value_dim, **sizes}
    like(variant, **base)


def _illegal_width(legal: range) -> int:
    """The smallest width that is not declared."""
    return next(d for d in range(1, max(legal) + 2) if d not in legal)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)


def _undeclared(scope: Scope) -> Iterable[Case]:
    have = scope.capabilities
    for feature in ASKABLE:
        if not have.declares(feature):
            yield case(note=feature, dtype=scope.base)
    if have.head_dims is not None and len(have.head_dims):
        yield case(note="head_dims", dtype=scope.base)
    for dtype in DTYPES:
        if dtype not in have.dtypes:
            yield case(note=f"dtype {dtype}", dtype=scope.base)
    if "meta" not in have.devices:
        yield case(note="device meta", dtype=scope.base)


def _plain(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case("gqa", dtype=scope.base)


CHECKS = (
    Check(check_refuses_what_it_does_not_declare, "refusals", _undeclared, random_too=True),
    Check(check_bad_inputs_are_invalid, "refusals", _plain, random_too=True),
)
