"""The stages of one request around `attend`: read, refuse, validate, resolve, clear padding, finish. Needs torch.

Each is a function; `Attention.forward` calls them in the order of docs/contract.md, "A call". Layout: query `[B, Hq, Lq, Dq]`,
key `[B, Hkv, Lk, Dk]`, value `[B, Hkv, Lk, Dv]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab._quoting import quoted
from attnlab._tracing import proxy_hint
from attnlab.call import Arguments, AttentionOutput, Call
from attnlab.capabilities import GateSpec
from attnlab.errors import InvalidInput
from attnlab.state import State
from attnlab.state.origin import origin_of
from attnlab.validation.declared import Declared
from attnlab.validation.refusals import BITS, DEVICE_BITS, DTYPE_BITS, UNKNOWN
from attnlab.visibility import AttentionMask, Visibility


class Reading(NamedTuple):
    """What `read` makes of a call: tensors of one dtype and valid shapes, the mask, the request as bits, and whether autograd records."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: AttentionMask | None
    bits: int
    recording: bool


# -- read: types, shapes, dtypes, and what is asked ---------------------------------------------------------------


def read(variant: Declared, query: Tensor, key: Tensor, value: Tensor, a: Arguments) -> Reading:
    """Validate the flags and the three tensors, state the mask, and write what the call asks as bits."""
    _validate_flags(variant.name, a)
    if not _fit(variant, query, key, value) or _autocasts(query.device):
        query, key, value = _cast_and_explain(variant, query, key, value)
    recording = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or variant.requires_gradients
        or _requires_grad(a)
    )
    mask = _mask_of(variant, a)
    bits = (
        DTYPE_BITS.get(query.dtype, UNKNOWN)
        | DEVICE_BITS.get(query.device.type, UNKNOWN)
        | (BITS.backward if recording else 0)
        | (BITS.cross_lengths if query.shape[2] != key.shape[2] and a.state is None else 0)
        | (BITS.gqa if variant.num_heads != variant.num_kv_heads else 0)
        | (BITS.value_dim if variant.value_dim != variant.key_dim else 0)
        | (BITS.query_dim if variant.head_dim != variant.key_dim else 0)
        | (0 if mask is None else _mask_bits(mask))
        | (BITS.bias if a.bias is not None else 0)
        | (BITS.scale if a.scale is not None else 0)
        | (BITS.softcap if a.softcap is not None else 0)
        | (BITS.score_mod if a.score_mod is not None else 0)
        | (BITS.sinks if a.sinks is not None else 0)
        | (BITS.gates if a.gates else 0)
        | (BITS.dropout if a.dropout_p else 0)
        | (BITS.weights if a.need_weights else 0)
        | (BITS.lse if a.need_lse else 0)
        | (BITS.state if a.state is not None else 0)
    )
    return Reading(query, key, value, mask, bits, recording)


def autocast_on(device: torch.device) -> bool:
    """Whether autocast casts on this device; some devices (meta) know no autocast."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _autocasts(device: torch.device) -> bool:
    return torch._C._is_any_autocast_enabled() and autocast_on(device)


def _fit(variant: Declared, query: Any, key: Any, value: Any) -> bool:
    """Whether the tensors fit the variant and each other; `_cast_and_explain` says what does not."""
    try:
        batch, heads, _, query_dim = query.shape
        batch_k, kv_heads, length, key_dim = key.shape
        batch_v, heads_v, length_v, value_dim = value.shape
        return bool(
            batch == batch_k == batch_v
            and length == length_v
            and heads == variant.num_heads
            and query_dim == variant.head_dim
            and kv_heads == heads_v == variant.num_kv_heads
            and key_dim == variant.key_dim
            and value_dim == variant.value_dim
            and query.dtype == key.dtype == value.dtype
            and query.device == key.device == value.device
            and query.layout == key.layout == value.layout == torch.strided
        )
    except (AttributeError, ValueError, TypeError, RuntimeError):
        return False


def _cast_and_explain(variant: Declared, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors, cast if autocast is on; `InvalidInput` for the first thing that does not fit."""
    name = variant.name
    for word, x in (("query", query), ("key", key), ("value", value)):
        _validate_layout(name, word, x)
    device = query.device
    if key.device != device or value.device != device:
        raise InvalidInput(
            f"{name}: query, key and value must share a device, got {device}, {key.device} and {value.device}; move them together"
        )
    if autocast_on(device):
        target = torch.get_autocast_dtype(device.type)
        casts = (x.is_floating_point() and x.dtype != torch.float64 for x in (query, key, value))
        query, key, value = (x.to(target) if cast else x for x, cast in zip((query, key, value), casts, strict=True))
    if not query.dtype == key.dtype == value.dtype:
        dtypes = ", ".join(_name(x.dtype) for x in (query, key, value))
        raise InvalidInput(
            f"{name}: query, key and value must share a dtype, got {dtypes}; cast them or use torch.autocast"
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InvalidInput(
            f"{name}: query, key and value must share a batch size, got {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        )
    if key.shape[1] != value.shape[1]:
        raise InvalidInput(
            f"{name}: key and value must have as many heads as each other, got {key.shape[1]} and {value.shape[1]}"
        )
    if key.shape[2] != value.shape[2]:
        raise InvalidInput(f"{name}: key and value must have one length, got {key.shape[2]} and {value.shape[2]}")
    for word, size, expected, what in (
        ("query", query.shape[1], variant.num_heads, "heads"),
        ("key", key.shape[1], variant.num_kv_heads, "heads"),
        ("query", query.shape[3], variant.head_dim, "head width"),
        ("key", key.shape[3], variant.key_dim, "head width"),
        ("value", value.shape[3], variant.value_dim, "head width"),
    ):
        if size != expected:
            hint = "; the layout is [B, H, L, D], with heads before length" if what == "heads" else ""
            raise InvalidInput(
                f"{name}: {word} must have {what} {expected} as the variant was created, got {size}{hint}"
            )
    return query, key, value


def _validate_layout(name: str, word: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise InvalidInput(f"{name}: {word} must be a tensor [B, H, L, D], got {type(x).__name__}{proxy_hint(x)}")
    if x.is_nested:
        raise InvalidInput(
            f"{name}: {word} must be a dense tensor [B, H, L, D], got a nested one; "
            "pad it with to_padded_tensor(0.0) and give key_lengths="
        )
    if x.dim() != 4:
        hint = "; add a batch axis with unsqueeze(0)" if x.dim() == 3 else ""
        raise InvalidInput(f"{name}: {word} must have four axes [B, H, L, D], got {list(x.shape)}{hint}")
    if x.layout != torch.strided:
        raise InvalidInput(f"{name}: {word} must be a dense (strided) tensor, got layout {x.layout}; call .to_dense()")


def _validate_flags(name: str, a: Arguments) -> None:
    """Validate the arguments whose truth value says what is asked, before that value is read."""
    p = a.dropout_p
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p <= 1.0:
        raise InvalidInput(f"{name}: dropout_p must be a number from 0 to 1, got {_description(p)}")
    for word, flag in (("need_weights", a.need_weights), ("need_lse", a.need_lse)):
        if not isinstance(flag, bool):
            raise InvalidInput(f"{name}: {word} must be True or False, got {_description(flag)}")
    if a.gates is not None and not isinstance(a.gates, Mapping):
        raise InvalidInput(f"{name}: gates must be a mapping of name to tensor, got {_description(a.gates)}")


def _requires_grad(a: Arguments) -> bool:
    """Whether a gradient reaches a tensor beside query, key and value."""
    gates = () if a.gates is None else a.gates.values()
    return any(isinstance(x, Tensor) and x.requires_grad for x in (a.bias, a.sinks, *gates))


def _mask_of(variant: Declared, a: Arguments) -> AttentionMask | None:
    """The mask of the call's arguments, None if they hide nothing; an `AttentionMask` alone is returned as it is."""
    loose = (a.offset, a.window, a.key_lengths, a.query_lengths, a.key_mask, a.segments, a.mask_mod)
    alone = a.causal is False and all(x is None for x in loose)
    if alone and a.mask is None:
        return None
    if alone and isinstance(a.mask, AttentionMask) and a.mask.cache is not None:
        return a.mask
    return mask_of(
        variant.name,
        causal=a.causal,
        offset=a.offset,
        window=a.window,
        key_lengths=a.key_lengths,
        query_lengths=a.query_lengths,
        key_mask=a.key_mask,
        segments=a.segments,
        mask=a.mask,
        mask_mod=a.mask_mod,
    )


def mask_of(subject: str, *, mask: Any = None, **parts: Any) -> AttentionMask:
    """One `AttentionMask` of an `AttentionMask` or a bool tensor and further parts; `InvalidInput` opens with `subject`."""
    whole = mask if isinstance(mask, AttentionMask) else None
    if whole is None and mask is not None and not isinstance(mask, Tensor):
        raise InvalidInput(f"{subject}: mask must be a bool tensor or an AttentionMask, got {type(mask).__name__}")
    try:
        loose = AttentionMask(**parts, allowed=None if whole is not None else mask)
        return loose if whole is None else whole.merged(loose)
    except InvalidInput as fault:
        raise InvalidInput(f"{subject}: {fault}") from None


def _mask_bits(mask: AttentionMask) -> int:
    return (
        (BITS.causal if mask.causal else 0)
        | (BITS.window if mask.window is not None else 0)
        | (BITS.key_mask if mask.key_mask is not None or mask.key_lengths is not None else 0)
        | (BITS.segments if mask.segments is not None else 0)
        | (BITS.mask if mask.allowed is not None else 0)
        | (BITS.mask_mod if mask.mask_mod is not None else 0)
    )


# -- validate: everything that is neither a mask nor one of the three tensors -------------------------------------


def validate(variant: Declared, query: Tensor, key: Tensor, a: Arguments) -> None:
    """Types, shapes and ranges of state, scale, softcap, score_mod, bias, sinks and gates; `InvalidInput` names the first fault."""
    name = variant.name
    batch, heads, length, _ = query.shape
    if a.state is not None:
        _validate_state(variant, a.state, batch, key)
    keys = key.shape[2] + (0 if a.state is None else a.state.length)
    _validate_number(name, "scale", a.scale, None)
    _validate_number(name, "softcap", a.softcap, 0.0)
    if a.score_mod is not None and not callable(a.score_mod):
        raise InvalidInput(
            f"{name}: score_mod must be a function (score, b, h, q, k), got {type(a.score_mod).__name__}"
        )
    if (bias := a.bias) is not None:
        full = [batch, heads, length, keys]
        _validate_float(name, "bias", bias, query)
        if bias.dim() != 4 or any(size not in (1, n) for size, n in zip(bias.shape, full, strict=True)):
            hint = "; add the missing axes, such as bias[None, None]" if bias.dim() != 4 else ""
            raise InvalidInput(f"{name}: bias must broadcast to {full} with four axes, got {list(bias.shape)}{hint}")
    if a.sinks is not None:
        _validate_float(name, "sinks", a.sinks, query)
        if list(a.sinks.shape) != [heads]:
            raise InvalidInput(f"{name}: sinks must be [Hq] = [{heads}], got {list(a.sinks.shape)}")
    if a.gates or variant._gated:
        _validate_gates(variant, a.gates, key)


def _validate_number(name: str, word: str, value: Any, above: float | None) -> None:
    if value is None or isinstance(value, torch.SymFloat):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (above is not None and value <= above):
        expected = "a finite number" if above is None else f"a finite number above {above:g}"
        hint = "; use .item() if it is a constant" if isinstance(value, Tensor) else ""
        raise InvalidInput(f"{name}: {word} must be {expected} or None, got {_description(value)}{hint}")


def _validate_float(name: str, word: str, value: Any, query: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = _name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        hint = "; a bool mask goes into mask=" if kind == "bool" else ""
        raise InvalidInput(f"{name}: {word} must be a floating-point tensor, got {kind}{hint}")
    if value.device != query.device:
        raise InvalidInput(
            f"{name}: {word} is on {value.device} and query on {query.device}; move it with .to(query.device)"
        )


def _validate_gates(variant: Declared, gates: Mapping[str, Tensor] | None, key: Tensor) -> None:
    name, specs = variant.name, variant.gates
    needed = ", ".join(f"{g}: {s.shape} in {s.range}" for g, s in specs.items()) or "none"
    if gates is None:
        raise InvalidInput(f"{name}: gates must be a mapping with {needed}, got NoneType; pass gates={{...}}")
    if set(gates) != set(specs):
        raise InvalidInput(
            f"{name}: gates must be exactly {needed}, got {', '.join(sorted(map(str, gates))) or 'none'}"
        )
    shape = list(key.shape)
    for gate, value in gates.items():
        _validate_float(name, f"gate {gate}", value, key)
        expected = shape if specs[gate].shape.endswith("Dk]") and value.dim() == 4 else shape[:3]
        if list(value.shape) != expected:
            raise InvalidInput(f"{name}: gate {gate} must be {specs[gate].shape} = {expected}, got {list(value.shape)}")


def _validate_state(variant: Declared, state: Any, batch: int, key: Tensor) -> None:
    name, kind = variant.name, variant.state_type
    if not isinstance(state, State):
        raise InvalidInput(f"{name}: state must come from init_state or an earlier output, got {type(state).__name__}")
    if not isinstance(state, kind) or (state.named_only and type(state) is not kind):
        raise InvalidInput(
            f"{name}: state must be a {kind.__name__} from its own init_state, got a {type(state).__name__}"
        )
    state.check(name, batch, *variant.state_sizes, key.shape[2], key)
    if state.origin is not None and (parts := origin_of(variant)) is not None:
        state.origin.check(parts, name, "the state holds what was")


def validate_offset(variant: Declared, reading: Reading, a: Arguments) -> None:
    """`InvalidInput` for an offset that nothing in the call reads, unless it says what holds without it.

    Readers are causal=, window=, mask_mod= and score_mod=, and variants that read the positions of queries.
    """
    mask = reading.mask
    if mask is None or mask.offset is None:
        return
    reads = variant.reads_query_positions and not variant.capabilities.position_free
    if reads or mask.positional or mask.window is not None or mask.mask_mod is not None or a.score_mod is not None:
        return
    offset, past = mask.offset, 0 if a.state is None else a.state.length
    if reading.query.shape[2] == reading.key.shape[2] and not isinstance(offset, Tensor):
        aligned = mask.key_lengths is None and mask.query_lengths is None and mask.segments is None
        if offset == past or (offset == "top_left" and not past) or (offset == "bottom_right" and aligned):
            return
    raise InvalidInput(
        f"{variant.name}: offset says where queries stand for causal=, window=, mask_mod= and score_mod=, and this call gives "
        f"none of them, got offset={'a tensor' if isinstance(offset, Tensor) else quoted(offset)}; give the rule that should "
        "count from it, or leave offset out"
    )


def _description(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else quoted(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- padding: cleared before `attend`, and zeroed in its result ---------------------------------------------------


def clear_padding(
    reading: Reading, visibility: Visibility, padding: Tensor | None, gates: Any, specs: Mapping[str, GateSpec]
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """`(query, key, value, gates)` with zeros in padded slots, and gates that change nothing there.

    padding: bool `[B, 1, Lk, 1]`, which keys of the call are padding, or None.
    """
    query, key, value = reading.query, reading.key, reading.value
    if padding is not None:
        key, value = clear_keys(key, value, padding)
        if gates:
            gates = {
                name: gate.masked_fill(padding if gate.dim() == 4 else padding[..., 0], specs[name].absent)
                for name, gate in gates.items()
            }
    if visibility.query_present is not None:
        query = query.masked_fill(~visibility.query_present[:, None, :, None], 0)
    return query, key, value, gates


def clear_keys(key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros in the slots of `padding [B, 1, Lk, 1]`, each in one pass; `masked_fill` takes two."""
    return torch.where(padding, 0.0, key), torch.where(padding, 0.0, value)


def zero_padded_queries(result: AttentionOutput, present: Tensor, weights_are_zero: bool) -> AttentionOutput:
    """Zeros in the rows of padded queries, and an `lse` of -inf. present: bool `[B, Lq]`.

    weights_are_zero: whether `attend` zeroed the weights there; a copy of them would leave the graph of the output.
    """
    padding = ~present[:, None, :]  # [B, 1, Lq]
    weights = result.weights
    return AttentionOutput(
        result.out.masked_fill(padding[..., None], 0),
        weights if weights is None or weights_are_zero else weights.masked_fill(padding[..., None], 0),
        None if result.lse is None else result.lse.masked_fill(padding, -torch.inf),
        result.state,
    )


def empty_output(value_dim: int, query: Tensor, key: Tensor, value: Tensor, call: Call, keys: int) -> AttentionOutput:
    """The output of a call without queries, keys or batch: zeros (or nothing) of the right shape, with gradients; no state."""
    batch, heads, length, _ = query.shape
    anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()  # 0, in the graph
    out = query.new_zeros(batch, heads, length, value_dim) + anchor
    weights = lse = None
    if call.need_weights:  # in the graph of the output, as they are elsewhere
        weights = query.new_zeros(batch, heads, length, keys) + anchor
        out = out + weights.sum()
    if call.need_lse:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full((batch, heads, length), -torch.inf, dtype=wide, device=query.device)
    return AttentionOutput(out, weights, lse)
