"""The gate's shape half: types, shapes and ranges of a call's arguments, masks aside. Only `interface` imports it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlab._quoting import quoted
from attnlab._symbolic import hint_of
from attnlab.errors import InvalidInput
from attnlab.gate.refusals import autocast_on
from attnlab.state import State
from attnlab.state.origin import origin_of
from attnlab.visibility import AttentionMask

if TYPE_CHECKING:
    from attnlab.interface import Attention


def explain_shapes(variant: Attention, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Cast for autocast where it is on, then raise `InvalidInput` for the first thing that does not fit."""
    name = variant.name
    tensors = (("query", query), ("key", key), ("value", value))
    for word, t in tensors:
        if not isinstance(t, Tensor):
            raise InvalidInput(f"{name}: {word} must be a tensor [B, H, L, D], got {type(t).__name__}{hint_of(t)}")
        if t.is_nested:
            raise InvalidInput(
                f"{name}: {word} must be a dense tensor [B, H, L, D], got a nested one; "
                "pad it with to_padded_tensor(0.0) and give key_lengths="
            )
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
            t.to(target) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (query, key, value)
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
        raise InvalidInput(f"{name}: key and value must have as many heads as each other, got {kv_heads} and {heads_v}")
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
            raise InvalidInput(f"{name}: {word} must have {what} {want} as the variant was created, got {got}{extra}")
    return query, key, value


def check_offset(
    variant: Attention, said: AttentionMask, score_mod: Any, query_length: int, key_length: int, state: Any
) -> None:
    """`InvalidInput` for an offset that nothing in the call reads, unless it says what holds without it.

    Readers are causal=, window=, mask_mod= and score_mod=, and variants that read where queries stand.
    """
    reads = variant.reads_query_positions and not variant.capabilities.position_free
    if reads or said.positional or said.window is not None or said.mask_mod is not None or score_mod is not None:
        return
    offset, past = said.offset, state.length if isinstance(state, State) else 0
    if query_length == key_length and not isinstance(offset, Tensor):
        aligned = said.key_lengths is None and said.query_lengths is None and said.segments is None
        if offset == past or (offset == "top_left" and not past) or (offset == "bottom_right" and aligned):
            return
    got = "a tensor" if isinstance(offset, Tensor) else quoted(offset)
    raise InvalidInput(
        f"{variant.name}: offset says where queries stand for causal=, window=, mask_mod= and score_mod=, and this call gives "
        f"none of them, got offset={got}; give the rule that should count from it, or leave offset out"
    )


def check_flags(name: str, dropout_p: Any, need_weights: Any, need_lse: Any, gates: Any) -> None:
    """Judge the arguments whose truth value says what is asked, before it is read."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise InvalidInput(f"{name}: dropout_p must be a number from 0 to 1, got {_got(dropout_p)}")
    for word, flag in (("need_weights", need_weights), ("need_lse", need_lse)):
        if not isinstance(flag, bool):
            raise InvalidInput(f"{name}: {word} must be True or False, got {_got(flag)}")
    if gates is not None and not isinstance(gates, Mapping):
        raise InvalidInput(f"{name}: gates must be a mapping of name to tensor, got {_got(gates)}")


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
    if score_mod is not None and not callable(score_mod):
        raise InvalidInput(f"{name}: score_mod must be a function (score, b, h, q, k), got {type(score_mod).__name__}")
    if bias is not None:
        full = [batch, heads, lq, total]
        _check_float(name, "bias", bias, query)
        if bias.dim() != 4 or any(have not in (1, want) for have, want in zip(bias.shape, full, strict=True)):
            hint = "; add the missing axes, such as bias[None, None]" if bias.dim() != 4 else ""
            raise InvalidInput(f"{name}: bias must broadcast to {full} with four axes, got {list(bias.shape)}{hint}")
    if sinks is not None:
        _check_float(name, "sinks", sinks, query)
        if list(sinks.shape) != [heads]:
            raise InvalidInput(f"{name}: sinks must be [Hq] = [{heads}], got {list(sinks.shape)}")
    if gates or variant._gated:
        _check_gates(variant, gates, key)


def _check_number(name: str, word: str, value: Any, above: float | None) -> None:
    if value is None or isinstance(value, torch.SymFloat):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (above is not None and value <= above):
        wanted = "a finite number" if above is None else f"a finite number above {above:g}"
        hint = "; use .item() if it is a constant" if isinstance(value, Tensor) else ""
        raise InvalidInput(f"{name}: {word} must be {wanted} or None, got {_got(value)}{hint}")


def _got(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else quoted(value)


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
    needed = ", ".join(f"{g}: {s.shape} in {s.range}" for g, s in specs.items()) or "none"
    if not isinstance(gates, Mapping):
        raise InvalidInput(
            f"{name}: gates must be a mapping with {needed}, got {type(gates).__name__}; pass gates={{...}}"
        )
    if set(gates) != set(specs):
        given = ", ".join(sorted(map(str, gates))) or "none"
        raise InvalidInput(f"{name}: gates must be exactly {needed}, got {given}")
    shape = list(key.shape)
    for gate, value in gates.items():
        _check_float(name, f"gate {gate}", value, key)
        want = shape if specs[gate].shape.endswith("Dk]") and value.dim() == 4 else shape[:3]
        if list(value.shape) != want:
            raise InvalidInput(f"{name}: gate {gate} must be {specs[gate].shape} = {want}, got {list(value.shape)}")


def _check_state(variant: Attention, state: Any, batch: int, new: int, key: Tensor) -> None:
    name = variant.name
    if not isinstance(state, State):
        raise InvalidInput(f"{name}: state must come from init_state or an earlier output, got {type(state).__name__}")
    if not isinstance(state, variant.state_type) or (state.named_only and type(state) is not variant.state_type):
        raise InvalidInput(
            f"{name}: state must be a {variant.state_type.__name__} from its own init_state, got a {type(state).__name__}"
        )
    state.check(name, batch, *variant.state_sizes, new, key)
    if state.origin is not None and (parts := origin_of(variant)) is not None:
        state.origin.check(parts, name, "the state holds what was")
