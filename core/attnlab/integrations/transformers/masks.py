"""Masks between transformers and attnlab: tensors that remember the structure they were made from.

Needs transformers; imported by `attnlab.integrations.transformers` only. The mask is built by that
library's own `sdpa` mask maker, so its meaning is theirs: bool `[B, 1, Lq, Lk]`, True = may attend. A model that runs
`eager`, or knows no other, gets the additive mask that `eager` gives it: 0, or the lowest number where none may attend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attnlab._tracing import run_while_tracing
from attnlab.engines.triton_launch import are_plain
from attnlab.visibility import AttentionMask

_TAG = "_attnlab_structure"
ADDITIVE = ", additive masks"  # ends an implementation's name where `eager` made the masks before
_additive_kinds: dict[type, bool] = {}


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one forward; None only for plain square causal attention from position 0, nothing padded.

    A bidirectional mask is always built: a None would read as causal in a module that says it is. An additive mask is built, or None,
    exactly where `eager` builds it, and None hides nothing there (`is_additive`). The
    tensor carries the `AttentionMask` it equals, where that is known, so windows, causality and padding keep
    their structure.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    additive = is_additive(config)
    square = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    if (
        allow_is_causal_skip
        and not additive
        and square
        and q_length > 1
        and function is causal_mask_function
        and attention_mask is None
    ):
        return None
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=additive and allow_is_bidirectional_skip,
        **kwargs,
    )
    if mask is None:
        return None
    if q_length != kv_length:  # generate makes masks of steps contiguous, and what it copied would have no tag
        mask = mask.contiguous()
    structure = request = None
    pattern = pattern_of(function)
    if pattern is not None:
        if pattern.get("causal") or "window" in pattern:
            pattern["offset"] = q_offset - kv_offset
        structure = AttentionMask(key_mask=_present(attention_mask, kv_length, kv_offset), **pattern)
        if not torch.compiler.is_compiling():
            # One for all layers of the forward; a view, as the mask itself would be held by its own attribute.
            structure = structure.with_cache(dense=mask.detach())
        request = _asked(structure, q_length == kv_length)
    result = _as_eager(mask, dtype) if additive else mask
    setattr(result, _TAG, (structure, _version(result), request, mask if additive else None))
    return result


def structure_of(mask: Tensor) -> AttentionMask | None:
    """The structure that `mask` was made from; None for a foreign tensor, a view, or one written to since.

    In a graph of `torch.compile` or `torch.export` the tag is a constant beside the mask that was made in it, where a write to the mask cannot be
    seen; a mask that was made outside comes into the graph without structure.
    """
    tag = getattr(mask, _TAG, None)
    return tag[0] if tag is not None and tag[1] == _version(mask) else None


def asked_of(mask: Tensor) -> Mapping[str, Any] | None:
    """What a layer that is handed `mask` asks of its variant by structure, as the arguments say it most plainly; None as `structure_of`."""
    tag = getattr(mask, _TAG, None)
    return tag[2] if tag is not None and tag[1] == _version(mask) else None


def is_own(mask: Tensor) -> bool:
    """Whether `mask` was made by `make_mask`, and is not the caller's own rule for each pair."""
    tag = getattr(mask, _TAG, None)
    return tag is not None and tag[1] == _version(mask)


def rule_of(mask: Tensor) -> Tensor:
    """The bool mask that an additive `mask` of `make_mask` was made from; any other mask as it is."""
    tag = getattr(mask, _TAG, None)
    if tag is None or tag[3] is None or tag[1] != _version(mask):
        return mask
    rule: Tensor = tag[3]
    return rule


def _as_eager(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, torch.zeros((), device=mask.device, dtype=dtype), torch.finfo(dtype).min)


def is_additive(config: Any) -> bool:
    """Whether the masks of a model with this config are as `eager` makes them: it ran `eager` before, or has nothing else."""
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        return False
    kind = type(config)
    if torch.compiler.is_compiling():
        _learn_kind(kind)
    elif kind not in _additive_kinds:
        _new_kind(kind)
    return bool(name.endswith(ADDITIVE)) or _additive_kinds[kind]


@run_while_tracing
def _learn_kind(kind: type) -> None:
    if kind not in _additive_kinds:
        _new_kind(kind)


def _new_kind(kind: type) -> None:
    """Note whether one of the models that belong to the config `kind` supports no `sdpa`, so that it knows additive masks alone."""
    from transformers import PreTrainedModel

    folder = kind.__module__.rpartition(".")[0]
    todo, result = [PreTrainedModel], False
    while todo:
        model = todo.pop()
        todo += model.__subclasses__()
        belongs = model.config_class is kind and model.__module__.rpartition(".")[0] == folder
        result = result or (belongs and not model._supports_sdpa)
    _additive_kinds[kind] = result


def _asked(structure: AttentionMask, square: bool) -> dict[str, Any]:
    words = structure.given()
    if not words:
        return {}  # nothing is hidden
    plain = words == ["causal", "offset"] and isinstance(structure.offset, int) and structure.offset == 0
    return {"causal": True} if plain and square else {"mask": structure}


def pattern_of(function: Callable[..., Any]) -> dict[str, Any] | None:
    """`AttentionMask` arguments that equal one of transformers' mask functions; None where it is another's.

    Known: bidirectional, causal, either with a sliding window, and any of them in packed sequences. `sliding_window=W` there
    leaves W keys including the query's own, so it is `left = W - 1` here; the bidirectional window is `W` to both sides. A window
    that leaves no key, of 0 or fewer, has no such words; configs state it where no layer has one.
    """
    from transformers import masking_utils as theirs

    if function is theirs.bidirectional_mask_function:
        return {}
    if function is theirs.causal_mask_function:
        return {"causal": True}
    parts = _closure(function, theirs.and_masks).get("mask_functions")
    if parts is None:
        size = _closure(function, theirs.sliding_window_overlay).get("sliding_window")
        if isinstance(size, int):
            return {"window": (size - 1, None)} if size > 0 else None
        both = _closure(function, theirs.sliding_window_bidirectional_overlay).get("sliding_window")
        return {"window": (both, both)} if isinstance(both, int) and both >= 0 else None
    if len(parts) == 2:
        ids = _closure(parts[1], theirs.packed_sequence_mask_function).get("packed_sequence_mask")
        inside = _closure(parts[0], theirs.remap_positions_for_packed_sequence).get("mask_function")
        if ids is not None and inside is not None:  # positions start anew in each sequence, as in segments
            known = pattern_of(inside)
            return None if known is None else {**known, "segments": (ids, ids)}
    merged: dict[str, Any] = {}
    for part in parts:
        known = pattern_of(part)
        if known is None or set(known) & set(merged):
            return None
        merged.update(known)
    return merged


def _closure(function: Callable[..., Any], maker: Callable[..., Any]) -> dict[str, Any]:
    """What `function` closes over, where it was made by `maker`; else empty."""
    if getattr(function, "__qualname__", "").startswith(f"{maker.__qualname__}.<locals>."):
        return dict(inspect.getclosurevars(function).nonlocals)
    return {}


def _present(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """`[B, Lk]`, True = present, for the keys of this call, or None where all are; slots past the given mask are unfilled.

    Only where looking makes nobody wait, outside graphs and on the CPU, is it seen that a mask hides nothing.
    """
    if attention_mask is None:
        return None
    short = kv_length + kv_offset - attention_mask.shape[-1]
    whole = attention_mask.to(torch.bool)
    if short > 0:
        whole = torch.nn.functional.pad(whole, (0, short))
    present = whole[:, kv_offset : kv_offset + kv_length]
    looks = present.is_cpu and are_plain(present)
    return None if looks and bool(present.all()) else present


def _version(mask: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or mask.is_inference() else mask._version
