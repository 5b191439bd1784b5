"""Sequences packed in one row, as restarting `position_ids` show them where the model's mask does not. Needs torch.

transformers looks at `position_ids` only where there is neither an attention_mask nor a cache; with either its masks let packed
sequences see each other. What is looked at is the values of `position_ids`, once for all layers of a forward, and nothing in a graph,
where `attention_mask=` says that nothing is packed.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlab.engines.triton_launch import are_plain
from attnlab.errors import UnsupportedRequest
from attnlab.integrations.transformers.masks import is_own, rule_of, structure_of
from attnlab.visibility import AttentionMask

if TYPE_CHECKING:
    from attnlab.integrations.transformers.cache import StateLayer

_TAG = "_attnlab_packed"


class Packed(NamedTuple):
    """A row's sequences: the mask tensor that keeps them apart, and the structure that it equals, where that is known."""

    mask: Tensor
    said: AttentionMask | None


class _Looked(NamedTuple):
    """What the `position_ids` of a forward showed, for its other layers."""

    positions: weakref.ref[Tensor]
    version: int
    causal: bool
    mask: weakref.ref[Tensor] | None
    packed: Packed | None


_last: _Looked | None = None


def packed_sequences(
    module: nn.Module, positions: object, mask: Tensor | None, causal: bool, queries: int, keys: int
) -> Packed | None:
    """The mask of a call whose `position_ids` restart within a row; None where none does, or where the caller gave a mask of its own.

    `UnsupportedRequest` for new tokens that stand, by their position, in a sequence of which the cache holds more tokens than come
    before it: something else was packed beside it.
    """
    global _last
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != queries or keys < 2:
        return None
    if mask is not None and not is_own(mask):
        return None
    if not are_plain(positions):
        return None
    version = -1 if positions.is_inference() else positions._version
    last = _last
    if (
        last is not None
        and last.positions() is positions
        and last.version == version != -1
        and last.causal == causal
        and (last.mask is None if mask is None else last.mask is not None and last.mask() is mask)
    ):
        return last.packed
    structure = None if mask is None else structure_of(mask)
    decodes = causal or (structure is not None and structure.causal)
    if not decodes and _is_cross(module):
        return None  # the positions are those of its queries
    result = None
    if queries == keys:
        result = _in_one_call(positions, mask, structure, decodes)
    elif decodes:
        _refuse_beside_past(positions, structure, keys)
    refs = (weakref.ref(positions, _forget), None if mask is None else weakref.ref(mask, _forget))
    _last = _Looked(refs[0], version, causal, refs[1], result)
    return result


def _forget(_: object) -> None:
    global _last
    _last = None


def refuse_steps_back(layer: StateLayer | None, positions: object, mask: object) -> None:
    """Refuse tokens that do not stand behind those that the first layer's state holds, as `position_ids [B, L]` count.

    mask: the layer's, of the new tokens, which says where they are padding.
    """
    if layer is None or not isinstance(positions, Tensor) or positions.dim() != 2 or not positions.shape[1]:
        return
    if not are_plain(positions):
        return
    structure = structure_of(mask) if isinstance(mask, Tensor) else None
    first, last = positions[:, 0], positions[:, -1]
    if structure is not None and structure.key_mask is not None:
        padding = ~structure.key_mask
        first = positions.masked_fill(padding, torch.iinfo(positions.dtype).max).amin(1)
        last = positions.masked_fill(padding, -1).amax(1)
    former = layer.last_position if layer.token_count else None
    if former is not None and bool((first <= former).any()):
        raise UnsupportedRequest(
            "position_ids of new tokens must go on from those in the StateCache, got some that do not: another sequence begins in a "
            "row, and a state holds one; decode each sequence in a row of its own"
        )
    layer.last_position = last if former is None else torch.maximum(last, former)


def is_packed(mask: object) -> bool:
    """Whether a call's mask keeps packed sequences apart."""
    if isinstance(mask, AttentionMask):
        return mask.segments is not None
    return isinstance(mask, Tensor) and getattr(mask, _TAG, False)


def _is_cross(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False)) or "cross" in type(module).__name__.lower()


def _in_one_call(
    positions: Tensor, mask: Tensor | None, structure: AttentionMask | None, causal: bool
) -> Packed | None:
    present = None if structure is None else structure.key_mask
    if present is not None:
        positions = positions.expand(present.shape[0], -1)
    if structure is not None and structure.segments is not None:
        return None  # transformers has seen it
    begins = restarts(positions, present)
    if not bool(begins.any()) or not (causal or _counts_anew(positions, present, begins)):
        return None
    ids = begins.cumsum(1)
    same = (ids[:, :, None] == ids[:, None, :])[:, None]  # [B, 1, L, L]
    if mask is None:
        whole = same.tril() if causal else same
        structure = AttentionMask(causal=causal)
    else:
        whole = rule_of(mask) & same
    setattr(whole, _TAG, True)
    words = None if structure is None else replace(structure, offset=None, segments=(ids, ids))
    return Packed(whole, words)


def restarts(positions: Tensor, present: Tensor | None) -> Tensor:
    """Which present tokens of `position_ids [B, L]` stand no further than the present token before them: bool `[B, L]`."""
    if present is None:
        begins = positions[:, 1:] <= positions[:, :-1]
        return torch.nn.functional.pad(begins, (1, 0))
    at = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(present, at, -1).cummax(1).values[:, :-1]  # the last present token so far
    former = positions.gather(1, latest.clamp(min=0))
    begins = (positions[:, 1:] <= former) & (latest >= 0) & present[:, 1:]
    return torch.nn.functional.pad(begins, (1, 0))


def _counts_anew(positions: Tensor, present: Tensor | None, begins: Tensor) -> bool:
    """Whether each row counts on by one or begins again where it began: what packing looks like, and buckets of patches do not.

    Asked of layers that are not causal, where positions may be something else than places in a sequence.
    """
    goes_on = torch.nn.functional.pad(positions[:, 1:] == positions[:, :-1] + 1, (1, 0), value=True)
    first = torch.zeros_like(positions[:, :1]) if present is None else present.int().argmax(1, keepdim=True)
    again = begins & (positions == positions.gather(1, first))
    counts = goes_on | again
    if present is not None:
        counts = counts | ~present | (torch.arange(positions.shape[1], device=positions.device) == first)
    return bool(counts.all())


def _refuse_beside_past(positions: Tensor, structure: AttentionMask | None, keys: int) -> None:
    """Refuse new tokens whose positions count fewer tokens before them than the cache holds."""
    queries = positions.shape[1]
    offset: Any = keys - queries if structure is None or structure.offset is None else structure.offset
    slots = torch.arange(queries, device=positions.device) + offset  # [Lq]
    before = slots.expand(positions.shape[0], -1)
    own = torch.ones_like(positions, dtype=torch.bool)
    if structure is not None and structure.key_mask is not None:
        present = structure.key_mask.to(positions.device)
        index = slots.clamp(0, keys - 1)
        before, own = (present.cumsum(1) - 1)[:, index], present[:, index]
    if bool(((positions < before) & own).any()):
        raise UnsupportedRequest(
            "position_ids of new tokens must count the tokens before them in the cache, got fewer in some row: sequences are packed "
            "in one row, and nothing says which keys of the cache belong to the sequence that goes on; decode each sequence in a row of its own"
        )
