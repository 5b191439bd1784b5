"""The gate's capability half: what is asked as bits, refusals and their words. Imported by the gate's other parts and `modules`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE, BIT, DEVICES, DTYPES, Reason
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.request import Request
from attnlab.state import State
from attnlab.visibility import AttentionMask

if TYPE_CHECKING:
    from attnlab.interface import Attention

BITS = SimpleNamespace(**{name: BIT[name] for name in ASKABLE})
DTYPE_BITS = {getattr(torch, d): BIT[f"dtype {d}"] for d in DTYPES}
_DEVICE_BITS = {d: BIT[f"device {d}"] for d in DEVICES}
UNKNOWN = 1 << len(BIT)
"""The bit of a dtype or device that no variant can declare."""


P = ParamSpec("P")
R = TypeVar("R")


def run_while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of constants, whose result is a constant of the graph under `torch.compile`.

    This is `torch.compiler.assume_constant_result` without its import of the whole compiler, 1.3 s at first use.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as numbers, also where `torch.jit.trace` records and `tensor.shape` holds tensors: what a module is made with."""
    recording = torch._C._get_tracing_state()
    if recording is None:
        return tuple(tensor.shape)
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return tuple(tensor.shape)
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]


def autocast_on(device: torch.device) -> bool:
    """Whether autocast casts on this device; some devices (meta) know no autocast."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def device_bit(device: torch.device) -> int:
    return _DEVICE_BITS.get(device.type, UNKNOWN)


def request_of(bits: int, query: Tensor, key: Tensor, value: Tensor, past: int) -> Request:
    """The `Request` of a call whose shapes were judged."""
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
    )


def describe_refusal(variant: Attention, request: Request) -> list[Reason]:
    """A `Reason` for each thing that the request asks and the variant's capabilities lack."""
    have = variant.capabilities
    reasons = []
    for feature, form in ASKABLE.items():
        if request.asks(feature) and not getattr(have, feature):
            sizes = {
                "gqa": f"{request.num_kv_heads} key/value heads for {request.num_heads} query heads",
                "cross_lengths": f"{request.query_length} queries and {request.key_length} keys",
                "value_dim": f"value width d_v={request.value_dim} beside key width d_k={request.key_dim}",
                "query_dim": f"query width d_q={request.query_dim} beside key width d_k={request.key_dim}",
            }
            allowed = {
                "gqa": "as many as query heads",
                "cross_lengths": "one length",
                "value_dim": "d_v = d_k",
                "query_dim": "d_q = d_k",
            }
            reasons.append(
                Reason(feature, sizes.get(feature, form), allowed.get(feature, "no"), have.notes.get(feature, ""))
            )
    if request.dtype not in have.dtypes:
        reasons.append(
            Reason("dtype", f"dtype {request.dtype}", ", ".join(d for d in DTYPES if d in have.dtypes) or "none")
        )
    if request.device not in have.devices:
        reasons.append(Reason("device", f"device {request.device}", ", ".join(sorted(have.devices)) or "none"))
    for together, why in variant.conflicts:
        if all(request.asks(n) for n in together):
            forms = " together with ".join(ASKABLE[n] for n in together)
            reasons.append(Reason("+".join(together), forms, "one of them", why))
    if have.head_dims is not None:
        for word, size in (("d_q", request.query_dim), ("d_k", request.key_dim), ("d_v", request.value_dim)):
            if size not in have.head_dims:
                r = have.head_dims
                step = f" in steps of {r.step}" if r.step != 1 else ""
                reasons.append(Reason("head_dims", f"{word}={size}", f"{r.start} to {r[-1]}{step}"))
    return reasons


def refusal_message(variant: Attention, request: Request, reasons: list[Reason]) -> str:
    """`NAME does not support ...; variants of the same formula that could: ...`."""
    message = f"{variant.name} does not support " + "; ".join(map(str, reasons))
    asked = tuple(name for name in ASKABLE if request.asks(name))
    others = _could_serve(variant.name, variant.formula, asked, request.dtype, request.device)
    if others:
        return f"{message}. Variants of the formula {variant.formula} that declare it: {', '.join(others)}"
    return f"{message}. No other registered variant of the formula {variant.formula or '?'} declares it"


@run_while_tracing
def _could_serve(name: str, formula: str, features: tuple[str, ...], dtype: str, device: str) -> list[str]:
    from attnlab.catalogue import default_registry
    from attnlab.errors import AttnlabError

    try:
        registry = default_registry()
        rows = [registry.info(other) for other in registry.names()]
    except AttnlabError:  # a broken registry file has its own report; the refusal stands without the hint
        return []
    return [
        row.name
        for row in rows
        if row.formula == formula
        and row.name != name
        and row.capabilities is not None
        and row.unavailable is None
        and set(features) <= set(row.capabilities)
        and (not row.dtypes or dtype in row.dtypes)
        and (not row.devices or device in row.devices)
    ]


def stated(
    variant: Attention,
    causal: Any,
    offset: Any,
    window: Any,
    key_lengths: Any,
    query_lengths: Any,
    key_mask: Any,
    segments: Any,
    mask: Any,
    mask_mod: Any,
) -> AttentionMask:
    whole = mask if isinstance(mask, AttentionMask) else None
    if whole is None and mask is not None and not isinstance(mask, Tensor):
        raise InvalidInput(f"{variant.name}: mask must be a bool tensor or an AttentionMask, got {type(mask).__name__}")
    try:
        loose = AttentionMask(
            causal=causal,
            offset=offset,
            window=window,
            key_lengths=key_lengths,
            query_lengths=query_lengths,
            key_mask=key_mask,
            segments=segments,
            allowed=None if whole is not None else mask,
            mask_mod=mask_mod,
        )
        return loose if whole is None else whole.merged(loose)
    except InvalidInput as fault:
        raise InvalidInput(f"{variant.name}: {fault}") from None


def only_kept(given: tuple[Any, ...]) -> AttentionMask | None:
    """The mask among what `stated` takes, where it is one that keeps and nothing is said beside it: it was judged when it was made."""
    causal, *others, mask, mask_mod = given
    if not isinstance(mask, AttentionMask) or mask.kept is None or causal is not False or mask_mod is not None:
        return None
    return mask if all(x is None for x in others) else None


def mask_bits(mask: AttentionMask) -> int:
    bits = BITS.causal if mask.causal else 0
    if mask.window is not None:
        bits |= BITS.window
    if mask.key_mask is not None or mask.key_lengths is not None:
        bits |= BITS.key_mask
    if mask.segments is not None:
        bits |= BITS.segments
    if mask.allowed is not None:
        bits |= BITS.mask
    if mask.mask_mod is not None:
        bits |= BITS.mask_mod
    return bits


def require_sizes(variant: Attention) -> None:
    """`UnsupportedRequest` where the sizes that the variant was made with are not declared."""
    need = (
        (BITS.gqa, variant.num_heads != variant.num_kv_heads),
        (BITS.value_dim, variant.value_dim != variant.key_dim),
        (BITS.query_dim, variant.head_dim != variant.key_dim),
    )
    legal, have = variant.capabilities.head_dims, variant.capabilities.bits
    sizes = (variant.head_dim, variant.key_dim, variant.value_dim)
    odd = legal is not None and any(d not in legal for d in sizes)
    if odd or any(on and not have & bit for bit, on in need):
        request = Request.of(
            num_heads=variant.num_heads,
            num_kv_heads=variant.num_kv_heads,
            head_dim=variant.head_dim,
            key_dim=variant.key_dim,
            value_dim=variant.value_dim,
        )
        features = {"gqa", "value_dim", "query_dim", "head_dims"}
        reasons = [r for r in describe_refusal(variant, request) if r.feature in features]
        raise UnsupportedRequest(f"{variant.name} does not support " + "; ".join(map(str, reasons)), reasons)


def judge(variant: Attention, bits: int, query: Tensor, key: Tensor, value: Tensor, state: State | None) -> None:
    """Refuse with every reason, or remember that this request is served."""
    past = state.length if isinstance(state, State) else 0
    graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    asked = None if graph else (bits, query.shape, key.shape, value.shape, past)
    if asked is not None and asked in variant._verdicts:
        return
    request = request_of(bits, query, key, value, past)
    reasons = variant.supports(request)
    missing = describe_refusal(variant, request)
    if missing and not reasons:
        reasons = missing
    if reasons:
        raise UnsupportedRequest(refusal_message(variant, request, reasons), reasons)
    if asked is not None:
        if len(variant._verdicts) > 512:
            variant._verdicts.clear()
        variant._verdicts[asked] = True
