"""What is not declared is refused, with a reason, before any tensor work. Needs torch.

One case per undeclared askable; a variant that quietly accepts one fails, and the message names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from attnlab.capabilities import ASKABLE, DTYPES
from attnlab.conformance.cases import Case, case
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.inputs import Inputs, draw
from attnlab.conformance.messages import demand, where
from attnlab.conformance.subject import like
from attnlab.conformance.watching import Watch
from attnlab.errors import InvalidInput, UnsupportedRequest

# How each askable of a call is asked for: the arguments, made from plain inputs.
ASKED: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "causal": lambda x: {"causal": True},
    "window": lambda x: {"window": (2, 1)},
    "key_mask": lambda x: {
        "key_mask": torch.ones(x.key.shape[0], x.key.shape[2], dtype=torch.bool, device=x.key.device)
    },
    "mask": lambda x: {
        "mask": torch.ones(x.query.shape[2], x.key.shape[2], dtype=torch.bool, device=x.key.device)
    },
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
        _demand_refusal(variant, case, feature, lambda: _resized(variant, SIZES[feature]))
        return
    if feature == "state":
        _demand_refusal(
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
        _demand_refusal(variant, case, feature, lambda: _counted(variant, short, {}))
        return
    if feature == "backward":
        recorded = inputs.with_tensors(query=inputs.query.clone().requires_grad_())
        with torch.enable_grad():
            _demand_refusal(variant, case, feature, lambda: _counted(variant, recorded, {}))
        return
    if feature.startswith("dtype "):
        dtype = getattr(torch, feature.removeprefix("dtype "))
        cast = inputs.rebuilt({n: x.to(dtype) for n, x in inputs.tensors().items()})
        _demand_refusal(variant, case, "dtype", lambda: _counted(variant, cast, {}))
        return
    if feature == "device meta":
        moved = inputs.rebuilt({n: x.to("meta") for n, x in inputs.tensors().items()})
        _demand_refusal(variant, case, "device", lambda: _counted(variant.to("meta"), moved, {}))
        return
    _demand_refusal(variant, case, feature, lambda: _counted(variant, inputs, ASKED[feature](inputs)))


def check_bad_inputs_are_invalid(variant: Any, case: Case) -> None:
    """Wrong shapes, dtypes and ranges raise `InvalidInput` with one sentence, never another error or a result."""
    inputs = draw(case, variant)
    have = variant.capabilities
    q, k, v = inputs.query, inputs.key, inputs.value
    lq, lk = q.shape[2], k.shape[2]
    bad: list[tuple[str, Inputs, dict[str, Any]]] = [
        ("query with three axes", inputs.with_tensors(query=q[0]), {}),
        ("key of another batch size", inputs.with_tensors(key=k[:1], value=v[:1]), {}),
        ("value of another length", inputs.with_tensors(value=v[:, :, :-1]), {}),
        ("one query head too many", inputs.with_tensors(query=torch.cat([q, q[:, :1]], 1)), {}),
        ("key of another width", inputs.with_tensors(key=k[..., :-1]), {}),
        ("key of another dtype", inputs.with_tensors(key=k.to(torch.complex64)), {}),
    ]
    if have.mask:
        bad += [
            ("mask with three axes", inputs, {"mask": torch.ones(q.shape[0], lq, lk, dtype=torch.bool)}),
            ("mask of floats", inputs, {"mask": q.new_zeros(lq, lk)}),
            ("mask of another length", inputs, {"mask": torch.ones(lq, lk + 1, dtype=torch.bool)}),
        ]
    if have.key_mask:
        bad += [
            ("key_mask of integers", inputs, {"key_mask": torch.ones(q.shape[0], lk, dtype=torch.int64)}),
            (
                "key_mask with four axes",
                inputs,
                {"key_mask": torch.ones(q.shape[0], 1, 1, lk, dtype=torch.bool)},
            ),
        ]
    if have.causal:
        bad += [("offset that is no word", inputs, {"causal": True, "offset": "bottom-right"})]
        if have.cross_lengths:
            bad += [
                (
                    "causal at two lengths without offset",
                    inputs.with_tensors(query=q[:, :, :3]),
                    {"causal": True},
                )
            ]
    if have.window:
        bad += [("negative window", inputs, {"window": (-1, 0)})]
    if have.bias:
        bad += [("bias that does not broadcast", inputs, {"bias": q.new_zeros(1, 1, lq, lk + 1)})]
    if have.sinks:
        bad += [("sinks of another number", inputs, {"sinks": q.new_zeros(q.shape[1] + 1)})]
    if have.dropout:
        bad += [("dropout_p above 1", inputs, {"dropout_p": 1.5})]
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


def _demand_refusal(variant: Any, case: Case, feature: str, ask: Callable[[], Any]) -> None:
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


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)


def _undeclared(scope: Scope) -> Iterable[Case]:
    have = scope.capabilities
    for feature in ASKABLE:
        if not have.declares(feature):
            yield case(note=feature, dtype=scope.base)
    for dtype in DTYPES:
        if dtype not in have.dtypes:
            yield case(note=f"dtype {dtype}", dtype=scope.base)
    if "meta" not in have.devices:
        yield case(note="device meta", dtype=scope.base)


def _plain(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case("gqa", dtype=scope.base)


CHECKS = (
    Check(check_refuses_what_it_does_not_declare, "refusals", _undeclared),
    Check(check_bad_inputs_are_invalid, "refusals", _plain),
)
