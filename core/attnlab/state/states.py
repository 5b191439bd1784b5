"""What a variant remembers between calls: a cache of keys and values, or a recurrence's memory. Needs torch.

A state is consumed by the call that it is handed to: the result may reuse its storage, using it again raises,
and `clone()` forks it. States are plain dataclasses of tensors: they pickle, deepcopy and move between devices.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from attnlab._quoting import quoted
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.state.origin import Origin

S = TypeVar("S", bound="State")
C = TypeVar("C", bound="CacheState")


@dataclass(kw_only=True, eq=False)
class State:
    """Common to all states. `length` counts the tokens seen; every tensor has the batch as its first axis.

    key_present: bool `[B, length]`, None where every token was present.
    key_segments: integers `[B, length]` of packed input, None otherwise.
    leading: int64 `[B]`, how many padded tokens each row begins with, for a variant that reads where a sequence begins and keeps
        no key_present; None where no row begins with one, or nobody asks.
    origin: the parameters that its contents were computed from, None where they hold nothing of the kind.
    """

    length: int = 0
    key_present: Tensor | None = None
    key_segments: Tensor | None = None
    leading: Tensor | None = None
    spent: bool = False
    origin: Origin | None = None
    named_only: ClassVar[bool] = False  # whether a variant must name this very class in `state_type` to be handed it
    _signature: ClassVar[tuple[Any, ...] | None] = (
        None  # of the call that returned this state, if the next may repeat it
    )

    def spend(self, subject: str) -> None:
        """Mark as consumed; `InvalidInput` where that happened before."""
        self.check_unspent(subject)
        self.spent = True

    def check_unspent(self, subject: str) -> None:
        if self.spent:
            raise InvalidInput(
                f"{subject}: this state was consumed by an earlier call; continue from that call's output.state, "
                "or clone() a state before the call that should fork"
            )

    def _map(self: S, change: object) -> S:
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                value = change(value)  # type: ignore[operator]
            values[f.name] = value
        return replace(self, **values)

    def clone(self: S) -> S:
        """An independent copy that can be continued on its own."""
        self.check_unspent("state.clone()")
        return self._map(lambda t: t.clone())

    def to(self: S, device: torch.device | str) -> S:
        """The state on another device (the same storage where it is there already); this one stays usable."""
        self.check_unspent("state.to()")
        return self._map(lambda t: t.to(device))

    def detach(self: S) -> S:
        """The state cut from the autograd graph: truncated backpropagation through time; this one stays usable."""
        self.check_unspent("state.detach()")
        return self._map(lambda t: t.detach())

    def reorder(self: S, index: Tensor) -> S:
        """The state whose row `b` is this one's row `index[b]` (beam search); a copy, so this one stays usable."""
        self.check_unspent("state.reorder()")
        check_index("state.reorder", index)
        return self._map(lambda t: t.index_select(0, index))

    def crop(self: S, length: int) -> S:
        """The state after its first `length` tokens, where the mathematics allows."""
        raise UnsupportedRequest("state.crop: a recurrence cannot forget its last tokens; clone() before they are fed")

    def renewed(self: S) -> S:
        """The same content as a fresh, unspent state."""
        return replace(self, spent=False)

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        """Validate whether the state fits a call; `InvalidInput` otherwise."""
        self.check_unspent(subject)
        first = next((t for t in (getattr(self, f.name) for f in fields(self)) if isinstance(t, Tensor)), None)
        if first is not None:
            if first.shape[0] != batch:
                raise InvalidInput(f"{subject}: the state holds {first.shape[0]} sequences and the call {batch}")
            if first.device != key.device:
                raise InvalidInput(
                    f"{subject}: the state is on {first.device} and key on {key.device}; move it with .to()"
                )


@dataclass(kw_only=True, eq=False)
class CacheState(State):
    """Keys `[B, Hkv, room, Dk]` and values `[B, Hkv, room, Dv]` of the tokens so far, in the keys' dtype.

    `capacity` tokens are allocated at once and never exceeded; None grows by doubling. While autograd records,
    appending concatenates, so that nothing saved for backward is written over.
    """

    key: Tensor
    value: Tensor
    capacity: int | None = None
    shared: bool = False  # whether a graph or another state may hold the storage, so that it must not be written

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        capacity: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        value_heads: int | None = None,
    ) -> CacheState:
        """With no tokens yet. value_heads: where they are not as many as those of keys."""
        check_room(batch, capacity)
        room = capacity or 0
        return cls(
            key=torch.zeros(batch, kv_heads, room, key_dim, device=device, dtype=dtype),
            value=torch.zeros(batch, value_heads or kv_heads, room, value_dim, device=device, dtype=dtype),
            capacity=capacity,
        )

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        super().check(subject, batch, kv_heads, key_dim, value_dim, new, key)
        held, request = ((self.key.shape[1], self.key.shape[3], self.value.shape[3]), (kv_heads, key_dim, value_dim))
        if held != request:
            raise InvalidInput(
                f"{subject}: the state was made for key/value heads, key width, value width {held} and the call has {request}"
            )
        if self.key.dtype != key.dtype:
            raise InvalidInput(
                f"{subject}: the state holds {self.key.dtype} and key is {key.dtype}; init_state(dtype=...)"
            )
        if self.capacity is not None and self.length + new > self.capacity:
            raise InvalidInput(
                f"{subject}: the state has a capacity of {self.capacity} tokens, holds {self.length} and got {new} more; "
                "make it larger in init_state or leave capacity=None"
            )

    def append_step(self: C, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, C] | None:
        """`append` for one more token of a run of like calls, in as few steps as that takes: decoding is made of it.

        None where the store must not be written or has no room, where gradients are needed or padded tokens are remembered: then
        `check` and `append` do it. Sizes, dtype and device must have been validated with the call before.
        """
        total = self.length + 1
        if total > self.key.shape[2] or not self._can_step(key, value):
            return None
        self.key[:, :, self.length : total] = key
        self.value[:, :, self.length : total] = value
        following = self._after(total)
        return self.key.narrow(2, 0, total), self.value.narrow(2, 0, total), following

    def _can_step(self, key: Tensor, value: Tensor) -> bool:
        return not (
            self.spent
            or self.shared
            or self.key_present is not None
            or self.key_segments is not None
            or self.key.is_inference()
            or (
                torch.is_grad_enabled()
                and (key.requires_grad or value.requires_grad or self.key.requires_grad or self.value.requires_grad)
            )
        )

    def _after(self: C, length: int) -> C:
        """A copy of that length: what `replace` does, in a fraction of the time that a step takes."""
        following: C = object.__new__(type(self))
        following.__dict__.update(self.__dict__)
        following.length = length
        return following

    def append(
        self, key: Tensor, value: Tensor, *, recording: bool, present: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, CacheState]:
        """All keys, all values (views of the store) and the next state. `present` and `segments` span past and new."""
        past, new = self.length, key.shape[2]
        total = past + new
        if self._must_concatenate(recording):
            keys, values = (
                torch.cat([store[:, :, :past], fresh], 2) for store, fresh in ((self.key, key), (self.value, value))
            )
            store_k, store_v = keys, values
        else:
            store_k, store_v = self.key, self.value
            if total > store_k.shape[2]:
                room = max(total, 2 * past, 16)
                store_k, store_v = (_grown(store, past, room) for store in (store_k, store_v))
            store_k[:, :, past:total] = key
            store_v[:, :, past:total] = value
            keys, values = store_k.narrow(2, 0, total), store_v.narrow(2, 0, total)
        following = replace(
            self,
            key=store_k,
            value=store_v,
            length=total,
            key_present=present,
            key_segments=segments,
            spent=False,
            shared=recording,
        )
        return keys, values, following

    def _must_concatenate(self, recording: bool) -> bool:
        """Whether the store must not be written: a graph or another state holds it, or this mode cannot."""
        in_graph = self.key.requires_grad or self.value.requires_grad or self.shared
        return recording or in_graph or torch.compiler.is_compiling() or self._borrowed()

    def _borrowed(self) -> bool:
        """Whether the store was made in inference mode, outside of which it cannot be written."""
        return self.key.is_inference() and not torch.is_inference_mode_enabled()

    def to(self, device: torch.device | str) -> CacheState:
        self.shared = True
        return super().to(device)

    def detach(self) -> CacheState:
        self.shared = True
        return super().detach()

    def crop(self, length: int) -> CacheState:
        """The state after its first `length` tokens; shares storage, so this one is consumed."""
        self.check_crop(length)
        self.spend("state.crop()")
        return replace(
            self,
            length=length,
            spent=False,
            key_present=None if self.key_present is None else self.key_present[:, :length],
            key_segments=None if self.key_segments is None else self.key_segments[:, :length],
        )

    def check_crop(self, length: object) -> None:
        """`InvalidInput` for a length that the state never had."""
        if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)) or not 0 <= length <= self.length:
            raise InvalidInput(f"state.crop: length must lie in 0..{self.length}, got {quoted(length)}")


@dataclass(kw_only=True, eq=False)
class ProjectedState(CacheState):
    """A cache whose keys are what `project_key` made of them, `[B, Hq, room, *]`: of no use to who expects keys."""

    named_only: ClassVar[bool] = True


def _grown(store: Tensor, past: int, room: int) -> Tensor:
    larger = store.new_zeros(*store.shape[:2], room, store.shape[3])
    larger[:, :, :past] = store[:, :, :past]
    return larger


def check_index(subject: str, index: object) -> None:
    """Validate an index of sequences; `InvalidInput` otherwise."""
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise InvalidInput(f"{subject}: index must be an int32 or int64 tensor [B], got {got}")


def check_room(batch: object, capacity: object) -> None:
    """Validate what `init_state` was asked for; `InvalidInput` otherwise."""
    for word, value, other in (("batch", batch, ""), ("capacity", capacity, " or None")):
        if word == "capacity" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0:
            raise InvalidInput(f"init_state: {word} must be an int of 0 or more{other}, got {quoted(value)}")


def _check_memory(subject: str, held: Tensor, kv_heads: int, value_dim: int, key: Tensor, *others: torch.dtype) -> None:
    """Validate a memory `[B, Hkv, *, Dv]` that is summed in `accumulation_dtype`, or in one of `others`."""
    if (held.shape[1], held.shape[3]) != (kv_heads, value_dim):
        raise InvalidInput(
            f"{subject}: the state was made for key/value heads, value width {(held.shape[1], held.shape[3])} "
            f"and the call has {(kv_heads, value_dim)}"
        )
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    if held.dtype not in (wide, *others):
        raise InvalidInput(
            f"{subject}: the state holds {held.dtype} and sums of {key.dtype} keys need {wide}; init_state(dtype=...)"
        )


@dataclass(kw_only=True, eq=False)
class LinearState(State):
    """Sums of a kernelised variant: `kv [B, Hkv, P, Dv]` of `phi(k) v^T` and `z [B, Hkv, P]` of `phi(k)`, float32 or better."""

    kv: Tensor
    z: Tensor

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        super().check(subject, batch, kv_heads, key_dim, value_dim, new, key)
        _check_memory(subject, self.kv, kv_heads, value_dim, key, torch.float64)  # which some families sum in


@dataclass(kw_only=True, eq=False)
class RecurrentState(State):
    """A recurrence's memory `S [B, Hkv, Dk, Dv]`, float32 or better."""

    memory: Tensor

    def check(
        self, subject: str, batch: int, kv_heads: int, key_dim: int, value_dim: int, new: int, key: Tensor
    ) -> None:
        super().check(subject, batch, kv_heads, key_dim, value_dim, new, key)
        _check_memory(subject, self.memory, kv_heads, value_dim, key)
        if self.memory.shape[2] != key_dim:
            raise InvalidInput(
                f"{subject}: the state was made for key width {self.memory.shape[2]} and the call has {key_dim}"
            )
