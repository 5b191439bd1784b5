"""Refusals: what a request asks as bits, and a reason for each thing that a variant does not declare. Needs torch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE, BIT, DEVICES, DTYPES, Reason
from attnlab.errors import UnsupportedRequest
from attnlab.request import Request
from attnlab.requirements import NOTHING
from attnlab.state import State
from attnlab.validation.declared import Declared
from attnlab.visibility import AttentionMask

BITS = SimpleNamespace(**{name: BIT[name] for name in ASKABLE})
DTYPE_BITS = {getattr(torch, d): BIT[f"dtype {d}"] for d in DTYPES}
DEVICE_BITS = {d: BIT[f"device {d}"] for d in DEVICES}
UNKNOWN = 1 << len(BIT)
"""The bit of a dtype or device that no variant can declare."""

_SIZES = ("gqa", "value_dim", "query_dim", "head_dims")


def request_of(
    bits: int, query: Tensor, key: Tensor, value: Tensor, state: object, mask: AttentionMask | None = None
) -> Request:
    """The `Request` of a call whose shapes are valid."""
    past = state.length if isinstance(state, State) else 0
    offset = None if mask is None else mask.offset
    return Request(
        batch=query.shape[0],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        query_length=query.shape[2],
        key_length=key.shape[2] + past,
        query_dim=query.shape[3],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=str(query.dtype).removeprefix("torch."),
        device=query.device.type,
        bits=bits,
        past=past,
        offset=offset if isinstance(offset, int) else 0,
    )


def refuse(variant: Declared, request: Request) -> None:
    """Raise `UnsupportedRequest` with every reason of `variant.supports` and of its capabilities; return if there is none."""
    reasons = variant.supports(request) or undeclared(variant, request)
    if reasons:
        raise UnsupportedRequest(refusal_message(variant, request, reasons), reasons)


def undeclared(variant: Declared, request: Request) -> list[Reason]:
    """A `Reason` for each thing that the request asks and the capabilities lack, and for each requirement that it does not meet."""
    capabilities = variant.capabilities
    reasons = [
        Reason(feature, _form(feature, request), _ALLOWED.get(feature, "no"), capabilities.notes.get(feature, ""))
        for feature in ASKABLE
        if request.asks(feature) and not getattr(capabilities, feature)
    ]
    if request.dtype not in capabilities.dtypes:
        dtypes = ", ".join(d for d in DTYPES if d in capabilities.dtypes)
        reasons.append(Reason("dtype", f"dtype {request.dtype}", dtypes or "none"))
    if request.device not in capabilities.devices:
        devices = ", ".join(sorted(capabilities.devices))
        reasons.append(Reason("device", f"device {request.device}", devices or "none"))
    for together, why in variant.conflicts:
        if all(request.asks(n) for n in together):
            reasons.append(
                Reason("+".join(together), " together with ".join(ASKABLE[n] for n in together), "one of them", why)
            )
    if (legal := capabilities.head_dims) is not None:
        step = f" in steps of {legal.step}" if legal.step != 1 else ""
        for word, size in (("d_q", request.query_dim), ("d_k", request.key_dim), ("d_v", request.value_dim)):
            if size not in legal:
                reasons.append(Reason("head_dims", f"{word}={size}", f"{legal.start} to {legal[-1]}{step}"))
    if variant.requires is NOTHING:  # a graph that looks at lengths would be made anew for others
        return reasons
    return reasons + variant.requires.reasons(request)


_ALLOWED = {
    "gqa": "as many as query heads",
    "cross_lengths": "one length",
    "value_dim": "d_v = d_k",
    "query_dim": "d_q = d_k",
}


def _form(feature: str, request: Request) -> str:
    """What asks for a feature; only for a refusal, as a graph that formats a length serves no other."""
    match feature:
        case "gqa":
            return f"{request.num_kv_heads} key/value heads for {request.num_heads} query heads"
        case "cross_lengths":
            return f"{request.query_length} queries and {request.key_length} keys"
        case "value_dim":
            return f"value width d_v={request.value_dim} beside key width d_k={request.key_dim}"
        case "query_dim":
            return f"query width d_q={request.query_dim} beside key width d_k={request.key_dim}"
    return ASKABLE[feature]


def refusal_message(variant: Declared, request: Request, reasons: list[Reason]) -> str:
    """`NAME does not support ...`, with the variants of the same formula that could serve, if a registry made the variant."""
    message = f"{variant.name} does not support " + "; ".join(map(str, reasons))
    if variant._registry is None:
        return message
    features = tuple(name for name in ASKABLE if request.asks(name))
    names = variant._registry.declaring(variant.formula, features, request.dtype, request.device)
    names = [name for name in names if name != variant.name]
    if names:
        return f"{message}. Variants of the formula {variant.formula} that declare it: {', '.join(names)}"
    return f"{message}. No other registered variant of the formula {variant.formula or '?'} declares it"


def require_sizes(variant: Declared) -> None:
    """`UnsupportedRequest` if the sizes of the variant are not declared."""
    request = Request.of(
        num_heads=variant.num_heads,
        num_kv_heads=variant.num_kv_heads,
        head_dim=variant.head_dim,
        key_dim=variant.key_dim,
        value_dim=variant.value_dim,
    )
    reasons = [reason for reason in undeclared(variant, request) if reason.feature in _SIZES]
    if reasons:
        raise UnsupportedRequest(f"{variant.name} does not support " + "; ".join(map(str, reasons)), reasons)
