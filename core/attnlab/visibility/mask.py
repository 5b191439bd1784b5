"""AttentionMask: which query may attend to which key, as the caller states it. Needs torch.

Shapes: B batch, H query heads, Lq queries, Lk keys. Every boolean says True = may attend or present.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from attnlab._quoting import quoted
from attnlab.cache import BoundedCache
from attnlab.errors import InvalidInput
from attnlab.visibility.resolved import Visibility

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Offset = str | int | Tensor | None
OFFSET_WORDS = ("top_left", "bottom_right")
_LENGTHS = 256  # shapes of calls whose resolution a mask caches
_FEW = 64  # numbers that are quicker to list than to reduce
_FURTHEST = 1 << 62  # an offset beyond it leaves the range of int64 once a position is added


class MaskCache(NamedTuple):
    """What calls resolved of one mask.

    resolved: visibility and padding, by the shapes of the call. dense: the whole mask `[B, 1, Lq, Lk]` if the caller had it.
    parts: the names of the mask's parts.
    """

    resolved: BoundedCache
    dense: Tensor | None
    parts: str


class _WithCache:
    """A place for the cache beside the fields of a mask, so that it is neither compared, copied nor pickled."""

    __slots__ = ("_cache",)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionMask(_WithCache):
    """One statement of visibility; its parts combine with AND (docs/contract.md, "Visibility").

    causal: a key's position may not exceed its query's.
    offset: `"top_left"`, `"bottom_right"`, an int, or an integer tensor 0-d or `[B]`: query `i` stands
        at position `i + offset`.
    window: `(left, right)`, inclusive counts around the query's position, None unbounded.
    key_mask: bool `[B, Lk]`, True = present.  key_lengths, query_lengths: integers `[B]`.
    segments: `(query_ids [B, Lq], key_ids [B, Lk])`, integers, -1 = padding; positions restart in each.
    allowed: bool `[Lq, Lk]` or four axes broadcastable to `[B, H, Lq, Lk]`.
    mask_mod: `(b, h, q, k) -> bool`, of broadcasting integer tensors; q and k are positions.

    Raises `InvalidInput` for parts of the wrong type; shapes are validated against the tensors of a call.
    """

    causal: bool = False
    offset: Offset = None
    window: tuple[int | None, int | None] | None = None
    key_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    allowed: Tensor | None = None
    mask_mod: MaskMod | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise InvalidInput(f"causal must be True or False, got {_kind(self.causal)}; alignment goes into offset=")
        _check_offset(self.offset)
        if self.window is not None:
            object.__setattr__(self, "window", _checked_window(self.window))
        for name in ("key_lengths", "query_lengths"):
            _check_integers(name, getattr(self, name), 1, "[B]")
        _check_bool("key_mask", self.key_mask)
        if self.key_mask is not None and self.key_mask.dim() != 2:
            raise InvalidInput(f"key_mask must be [B, Lk], got {list(self.key_mask.shape)}")
        _check_bool("mask", self.allowed)
        if self.segments is not None:
            if not isinstance(self.segments, (tuple, list)) or len(self.segments) != 2:
                raise InvalidInput(f"segments must be (query_ids, key_ids), got {_kind(self.segments)}")
            for part, ids in zip(("segments query_ids", "segments key_ids"), self.segments, strict=True):
                _check_integers(part, ids, 2, "[B, L]", required=True)
            object.__setattr__(self, "segments", tuple(self.segments))
        if self.mask_mod is not None and not callable(self.mask_mod):
            raise InvalidInput(f"mask_mod must be a function (b, h, q, k) -> bool, got {_kind(self.mask_mod)}")

    def with_cache(self, dense: Tensor | None = None) -> AttentionMask:
        """The same mask, which caches its resolution for the shapes of each call: one mask for all layers of a model.

        Its tensors must not be written to as long as it is used. dense: what `to_dense` would return, bool `[B, 1, Lq, Lk]`, if
        the caller has it already.
        """
        same = replace(self)
        object.__setattr__(
            same, "_cache", MaskCache(BoundedCache(_LENGTHS), dense, " ".join(("mask of", *self.given())))
        )
        return same

    keeping = with_cache  # its former name

    @property
    def cache(self) -> MaskCache | None:
        """The cache of this mask; None if it has none, and in a graph or a trace."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        cache: MaskCache | None = getattr(self, "_cache", None)
        return cache

    @property
    def positional(self) -> bool:
        """Whether positions matter: causal or a window that bounds something."""
        return self.causal or (self.window is not None and self.window != (None, None))

    def given(self) -> list[str]:
        """The names of the parts that say something."""
        return [
            f.name for f in fields(self) if getattr(self, f.name) is not None and getattr(self, f.name) is not False
        ]

    def merged(self, other: AttentionMask) -> AttentionMask:
        """Both statements together; the same rule stated in both is `InvalidInput`."""
        mine, theirs = self.given(), other.given()
        twice = [name for name in theirs if name in mine]
        if twice:
            raise InvalidInput(
                f"{' and '.join(twice)} given twice, once in the AttentionMask and once as an argument; state it once"
            )
        return AttentionMask(**{n: getattr(self, n) for n in mine}, **{n: getattr(other, n) for n in theirs})

    def to_dense(
        self, batch: int, num_heads: int, query_length: int, key_length: int, device: torch.device | str | None = None
    ) -> Tensor:
        """The whole mask as bool, broadcastable to `[B, H, Lq, Lk]`; rows of padded queries are False.

        It takes `O(Lq Lk)` memory (times B or H only where a part depends on them): for looking and testing.
        """
        visibility = Visibility.resolve(
            self,
            batch=batch,
            num_heads=num_heads,
            query_length=query_length,
            key_length=key_length,
            device=torch.empty(0, device=self.device if device is None else device).device,
        )
        dense = visibility.dense()
        if visibility.query_present is not None:
            dense = dense & visibility.query_present[:, None, :, None]
        return dense

    def check_values(self, query_length: int, key_length: int, subject: str, *, everywhere: bool = False) -> None:
        """`InvalidInput` for lengths outside `[0, L]`, segment ids below -1 and offsets that overflow; lengths count the call's own tokens.

        Tensors on other devices, where looking would wait for the device, are looked at only with `everywhere`; in graphs, under transforms
        and in fake tensors there is nothing to look at.
        """
        if torch.compiler.is_compiling():
            return
        for name, lengths, limit in (
            ("key_lengths", self.key_lengths, key_length),
            ("query_lengths", self.query_lengths, query_length),
        ):
            if lengths is not None and (ends := _ends(lengths, everywhere)) is not None:
                low, high = ends
                if low < 0 or high > limit:
                    wrong = low if low < 0 else high
                    raise InvalidInput(
                        f"{subject}: {name} must lie in 0 to {limit}, the length of the call's tensors, got {wrong}; clip them, or pad the tensors"
                    )
        for part, ids in zip(("query_ids", "key_ids"), self.segments or (), strict=False):
            if (ends := _ends(ids, everywhere)) is not None and ends[0] < -1:
                raise InvalidInput(f"{subject}: segments {part} must be 0 or more, or -1 for padding, got {ends[0]}")
        offset = self.offset
        if isinstance(offset, (Tensor, int)):
            ends = _ends(offset, everywhere) if isinstance(offset, Tensor) else (offset, offset)
            if ends is not None and (ends[0] < -_FURTHEST or ends[1] > _FURTHEST):
                wrong = ends[0] if ends[0] < -_FURTHEST else ends[1]
                raise InvalidInput(f"{subject}: offset must lie in -2^62 to 2^62, got {wrong}")

    def validate(self, batch: int, num_heads: int, query_length: int, key_length: int) -> None:
        """Check the values on any device; `InvalidInput` names the first fault. A call checks those on the CPU by itself."""
        self.check_values(query_length, key_length, "mask", everywhere=True)
        self.to_dense(batch, num_heads, query_length, key_length)

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor among the parts, None where there is none."""
        parts = (self.key_mask, self.key_lengths, self.query_lengths, self.allowed, *(self.segments or ()), self.offset)
        return next((p.device for p in parts if isinstance(p, Tensor)), None)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_query: Tensor,
        cu_key: Tensor | None = None,
        *,
        query_length: int | None = None,
        key_length: int | None = None,
        **more: Any,
    ) -> AttentionMask:
        """Segments of one packed row from cumulative lengths `[n + 1]` starting at 0 (FlashAttention's varlen form).

        Tokens past the last boundary, up to `query_length` and `key_length`, are padding. Reads values once.
        """
        cu_key = cu_query if cu_key is None else cu_key
        for part, cu in (("cu_query", cu_query), ("cu_key", cu_key)):
            _check_integers(part, cu, 1, "[n + 1]", required=True)
        if cu_query.numel() != cu_key.numel() or cu_query.numel() < 1:
            raise InvalidInput(
                f"cu_seqlens must be two vectors of one length n + 1, got {list(cu_query.shape)} and {list(cu_key.shape)}"
            )
        ids = [_ids_of(cu, length) for cu, length in ((cu_query, query_length), (cu_key, key_length))]
        return cls(segments=(ids[0], ids[1]), **more)


def _ids_of(cu: Tensor, length: int | None) -> Tensor:
    bounds = cu.tolist()
    if bounds[0] != 0 or any(b < a for a, b in pairwise(bounds)):
        raise InvalidInput(f"cu_seqlens must start at 0 and never fall, got {bounds[:8]}")
    total = bounds[-1] if length is None else length
    if total < bounds[-1]:
        raise InvalidInput(f"cu_seqlens end at {bounds[-1]}, beyond the length {total}")
    positions = torch.arange(total, device=cu.device)
    ids = torch.searchsorted(cu.to(torch.int64), positions, right=True) - 1  # [L]
    return torch.where(positions < bounds[-1], ids, -1)[None]  # [1, L]


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a{'n' if dtype[0] == 'i' else ''} {dtype} tensor of shape {list(value.shape)}"
    return f"{quoted(value)} ({type(value).__name__})"


def _check_offset(offset: object) -> None:
    if offset is None:
        return
    if isinstance(offset, str):
        if offset not in OFFSET_WORDS:
            raise InvalidInput(
                f"offset must be 'top_left', 'bottom_right', an int or an integer tensor, got {quoted(offset)}"
            )
    elif isinstance(offset, Tensor):
        if offset.dtype.is_floating_point or offset.is_complex() or offset.dtype == torch.bool or offset.dim() > 1:
            raise InvalidInput(f"offset must be an integer tensor, 0-d or [B], got {_kind(offset)}")
    elif isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise InvalidInput(
            f"offset must be 'top_left', 'bottom_right', an int or an integer tensor, got {_kind(offset)}"
        )


def _checked_window(window: object) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidInput(
            f"window must be (left, right), got {_kind(window)}; a causal window of W tokens is window=(W - 1, 0)"
        )
    for side, count in zip(("left", "right"), window, strict=True):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
            raise InvalidInput(f"window {side} must be an int or None (unbounded), got {_kind(count)}")
        if count < 0:
            raise InvalidInput(f"window {side} must be 0 (itself only) or more, or None (unbounded), got {count}")
    return (window[0], window[1])


def _check_integers(name: str, value: object, axes: int, shape: str, required: bool = False) -> None:
    if value is None and not required:
        return
    if (
        not isinstance(value, Tensor)
        or value.dtype.is_floating_point
        or value.dtype == torch.bool
        or value.is_complex()
    ):
        raise InvalidInput(f"{name} must be an integer tensor {shape}, got {_kind(value)}")
    if value.dim() != axes:
        raise InvalidInput(f"{name} must be {shape}, got {list(value.shape)}")


def _check_bool(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{name} must be a bool tensor, got {_kind(value)}")
    if value.dtype != torch.bool:
        hint = (
            "add a float mask to the scores with bias="
            if value.dtype.is_floating_point
            else f"convert it with {name}.bool(), True = may attend"
        )
        raise InvalidInput(f"{name} must be a bool tensor, True = may attend, got {_kind(value)}; {hint}")


def _ends(values: Tensor, everywhere: bool) -> tuple[int, int] | None:
    """The least and the largest number; None where there is none, or none to be looked at."""
    if not _readable(values) or not (values.is_cpu or everywhere) or not values.numel():
        return None
    if values.numel() <= _FEW:
        numbers = values.flatten().tolist()
        return min(numbers), max(numbers)
    low, high = torch.aminmax(values)
    return int(low), int(high)


def _readable(values: Tensor) -> bool:
    """Whether it has numbers: no fake tensor, no trace, no batch of a transform."""
    modes = torch._C._TorchDispatchModeKey
    return (
        type(values) in (Tensor, torch.nn.Parameter)
        and not values.is_meta
        and not torch._C._functorch.is_legacy_batchedtensor(values)
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
        and torch._C._get_dispatch_mode(modes.FAKE) is None
        and torch._C._get_dispatch_mode(modes.PROXY) is None
    )


_TENSOR_PARTS = ("key_mask", "key_lengths", "query_lengths", "allowed")


def _flatten(mask: AttentionMask) -> tuple[list[Any], Any]:
    children, context = _flatten_with_keys(mask)
    return [child for _, child in children], context


def _flatten_with_keys(mask: AttentionMask) -> tuple[list[tuple[Any, Any]], Any]:
    """Tensors as children, named for messages about them; the rest as context."""
    offset_is_tensor = isinstance(mask.offset, Tensor)
    children = {name: getattr(mask, name) for name in (*_TENSOR_PARTS, "segments")}
    children["offset"] = mask.offset if offset_is_tensor else None
    plain_offset = None if offset_is_tensor else mask.offset
    context = mask.causal, mask.window, mask.mask_mod, plain_offset, offset_is_tensor
    return [(pytree.GetAttrKey(name), child) for name, child in children.items()], context


def _unflatten(children: Any, context: Any) -> AttentionMask:
    *parts, segments, offset = children
    causal, window, mask_mod, plain_offset, offset_is_tensor = context
    made = object.__new__(AttentionMask)  # leaves may be placeholders here, so nothing is checked
    values = dict(zip(_TENSOR_PARTS, parts, strict=True))
    values.update(
        causal=causal,
        window=window,
        mask_mod=mask_mod,
        segments=segments,
        offset=offset if offset_is_tensor else plain_offset,
    )
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(
    AttentionMask,
    _flatten,
    _unflatten,
    serialized_type_name="attnlab.AttentionMask",
    flatten_with_keys_fn=_flatten_with_keys,
)
