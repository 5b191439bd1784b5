"""The slow half of the gate: judging arguments and wording refusals. Only `interface` imports it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE, BIT, DEVICES, DTYPES, Reason
from attnlab.errors import InvalidInput
from attnlab.mask import AttentionMask
from attnlab.request import Request

if TYPE_CHECKING:
    from attnlab.interface import Attention
    from attnlab.state import State

BITS = SimpleNamespace(**{name: BIT[name] for name in ASKABLE})
DTYPE_BITS = {getattr(torch, d): BIT[f"dtype {d}"] for d in DTYPES}
_DEVICE_BITS = {d: BIT[f"device {d}"] for d in DEVICES}
UNKNOWN = 1 << len(BIT)
"""The bit of a dtype or device that no variant can declare."""


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
                Reason(
                    feature, sizes.get(feature, form), allowed.get(feature, "no"), have.notes.get(feature, "")
                )
            )
    if request.dtype not in have.dtypes:
        reasons.append(
            Reason(
                "dtype", f"dtype {request.dtype}", ", ".join(d for d in DTYPES if d in have.dtypes) or "none"
            )
        )
    if request.device not in have.devices:
        reasons.append(
            Reason("device", f"device {request.device}", ", ".join(sorted(have.devices)) or "none")
        )
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
    others = _could_serve(variant, request)
    if others:
        return f"{message}. Variants of the formula {variant.formula} that declare it: {', '.join(others)}"
    return f"{message}. No other registered variant of the formula {variant.formula or '?'} declares it"


def _could_serve(variant: Attention, request: Request) -> list[str]:
    from attnlab.catalogue import default_registry
    from attnlab.errors import AttnlabError

    try:
        registry = default_registry()
        rows = [registry.info(name) for name in registry.names()]
    except AttnlabError:  # a broken registry file has its own report; the refusal stands without the hint
        return []
    asked = request.features
    return [
        row.name
        for row in rows
        if row.formula == variant.formula
        and row.name != variant.name
        and row.capabilities is not None
        and row.unavailable is None
        and asked <= set(row.capabilities)
        and (not row.dtypes or request.dtype in row.dtypes)
        and (not row.devices or request.device in row.devices)
    ]


def explain_shapes(variant: Attention, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Cast for autocast where it is on, then raise `InvalidInput` for the first thing that does not fit."""
    name = variant.name
    tensors = (("query", query), ("key", key), ("value", value))
    for word, t in tensors:
        if not isinstance(t, Tensor):
            raise InvalidInput(f"{name}: {word} must be a tensor [B, H, L, D], got {type(t).__name__}")
        if t.dim() != 4:
            raise InvalidInput(
                f"{name}: {word} must have four axes [B, H, L, D], got {list(t.shape)}"
                + ("; add a batch axis with unsqueeze(0)" if t.dim() == 3 else "")
            )
        if t.layout != torch.strided:
            raise InvalidInput(
                f"{name}: {word} must be a dense (strided) tensor, got layout {t.layout}; call .to_dense()"
            )
    device = query.device
    if key.device != device or value.device != device:
        raise InvalidInput(
            f"{name}: query, key and value must share a device, got {device}, {key.device} and {value.device}; move them together"
        )
    if autocast_on(device):
        target = torch.get_autocast_dtype(device.type)
        query, key, value = (
            t.to(target) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in (query, key, value)
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InvalidInput(
            f"{name}: query, key and value must share a dtype, got "
            f"{', '.join(str(t.dtype).removeprefix('torch.') for t in (query, key, value))}; cast them or use torch.autocast"
        )
    (batch, heads, _, dq), (batch_k, kv_heads, lk, dk), (batch_v, heads_v, lk_v, dv) = (
        query.shape,
        key.shape,
        value.shape,
    )
    if not batch == batch_k == batch_v:
        raise InvalidInput(
            f"{name}: query, key and value must share a batch size, got {batch}, {batch_k} and {batch_v}"
        )
    if kv_heads != heads_v:
        raise InvalidInput(
            f"{name}: key and value must have as many heads as each other, got {kv_heads} and {heads_v}"
        )
    if lk != lk_v:
        raise InvalidInput(f"{name}: key and value must have one length, got {lk} and {lk_v}")
    for word, got, want, what in (
        ("query", heads, variant.num_heads, "heads"),
        ("key", kv_heads, variant.num_kv_heads, "heads"),
        ("query", dq, variant.head_dim, "head width"),
        ("key", dk, variant.key_dim, "head width"),
        ("value", dv, variant.value_dim, "head width"),
    ):
        if got != want:
            extra = "; the layout is [B, H, L, D], with heads before length" if what == "heads" else ""
            raise InvalidInput(
                f"{name}: {word} must have {what} {want} as the variant was created, got {got}{extra}"
            )
    return query, key, value


def check_extras(
    variant: Attention,
    query: Tensor,
    key: Tensor,
    bias: Any,
    scale: Any,
    softcap: Any,
    score_mod: Any,
    sinks: Any,
    gates: Any,
    dropout_p: Any,
    state: Any,
) -> None:
    """Types, shapes and ranges of everything that is not a mask; `InvalidInput` names the first fault."""
    name = variant.name
    batch, heads, lq, _ = query.shape
    new = key.shape[2]
    if state is not None:
        _check_state(variant, state, batch, new, key)
    total = new + (0 if state is None else state.length)
    _check_number(name, "scale", scale, None)
    _check_number(name, "softcap", softcap, 0.0)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise InvalidInput(f"{name}: dropout_p must be a number from 0 to 1, got {dropout_p!r}")
    if score_mod is not None and not callable(score_mod):
        raise InvalidInput(
            f"{name}: score_mod must be a function (score, b, h, q, k), got {type(score_mod).__name__}"
        )
    if bias is not None:
        full = [batch, heads, lq, total]
        _check_float(name, "bias", bias, query)
        if bias.dim() != 4 or any(have not in (1, want) for have, want in zip(bias.shape, full, strict=True)):
            hint = "; add the missing axes, such as bias[None, None]" if bias.dim() != 4 else ""
            raise InvalidInput(
                f"{name}: bias must broadcast to {full} with four axes, got {list(bias.shape)}{hint}"
            )
    if sinks is not None:
        _check_float(name, "sinks", sinks, query)
        if list(sinks.shape) != [heads]:
            raise InvalidInput(f"{name}: sinks must be [Hq] = [{heads}], got {list(sinks.shape)}")
    if gates or variant.gates:
        _check_gates(variant, gates, key)


def _check_number(name: str, word: str, value: Any, above: float | None) -> None:
    if value is None or isinstance(value, torch.SymFloat):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (above is not None and value <= above):
        wanted = "a finite number" if above is None else f"a finite number above {above:g}"
        hint = "; use .item() if it is a constant" if isinstance(value, Tensor) else ""
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise InvalidInput(f"{name}: {word} must be {wanted} or None, got {got}{hint}")


def _check_float(name: str, word: str, value: Any, query: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
        hint = "; a bool mask goes into mask=" if got == "bool" else ""
        raise InvalidInput(f"{name}: {word} must be a floating-point tensor, got {got}{hint}")
    if value.device != query.device:
        raise InvalidInput(
            f"{name}: {word} is on {value.device} and query on {query.device}; move it with .to(query.device)"
        )


def _check_gates(variant: Attention, gates: Mapping[str, Tensor] | None, key: Tensor) -> None:
    name, specs = variant.name, variant.gates
    if not isinstance(gates, Mapping):
        needed = ", ".join(f"{g}: {s.shape} in {s.range}" for g, s in specs.items())
        raise InvalidInput(
            f"{name}: gates must be a mapping with {needed}, got {type(gates).__name__}; pass gates={{...}}"
        )
    if set(gates) != set(specs):
        raise InvalidInput(
            f"{name}: gates must be exactly {', '.join(sorted(specs)) or 'none'}, got {', '.join(map(str, sorted(gates))) or 'none'}"
        )
    shape = list(key.shape)
    for gate, value in gates.items():
        _check_float(name, f"gate {gate}", value, key)
        want = shape if specs[gate].shape.endswith("Dk]") and value.dim() == 4 else shape[:3]
        if list(value.shape) != want:
            raise InvalidInput(
                f"{name}: gate {gate} must be {specs[gate].shape} = {want}, got {list(value.shape)}"
            )


def _check_state(variant: Attention, state: State, batch: int, new: int, key: Tensor) -> None:
    from attnlab.state import State as StateClass

    name = variant.name
    if not isinstance(state, StateClass):
        raise InvalidInput(
            f"{name}: state must come from init_state or an earlier output, got {type(state).__name__}"
        )
    state.check(name, batch, variant.num_kv_heads, variant.key_dim, variant.value_dim, new, key)


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
        raise InvalidInput(
            f"{variant.name}: mask must be a bool tensor or an AttentionMask, got {type(mask).__name__}"
        )
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
