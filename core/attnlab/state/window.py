"""The cache of a sliding window: what no later query can see is forgotten. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from attnlab.errors import UnsupportedRequest
from attnlab.state.states import CacheState, check_room

W = TypeVar("W", bound="WindowState")


@dataclass(kw_only=True, eq=False)
class WindowState(CacheState):
    """The first `sink_tokens` present tokens, and of the others the `left` before the next one and those of the last call.

    They lie beside each other in the store, rows `start` to `start + length - evicted`, oldest first: a step moves the window
    one row on, sink tokens with it, and a store that is full makes way for another. So memory is bounded by the window and
    not by `capacity`. `evicted` counts the tokens forgotten, which stood behind the sink tokens.
    """

    named_only: ClassVar[bool] = True  # who takes it for a whole cache would see a window of it
    left: int
    sink_tokens: int = 0
    start: int = 0
    evicted: int = 0

    @classmethod
    def for_window(
        cls,
        left: int,
        sink_tokens: int,
        batch: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        capacity: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> WindowState:
        """An empty one; with `capacity`, at most twice the window is allocated, at once."""
        check_room(batch, capacity)
        room = None if capacity is None else min(capacity, sink_tokens + 2 * left + 2)
        plain = CacheState.empty(batch, kv_heads, key_dim, value_dim, room, device, dtype)
        return cls(key=plain.key, value=plain.value, capacity=capacity, left=left, sink_tokens=sink_tokens)

    @property
    def held(self) -> int:
        """How many tokens are remembered."""
        return self.length - self.evicted

    def forgettable(self) -> int:
        """How many of the tokens held, behind the sink tokens, no query from here on can see."""
        return max(0, self.held - self.sink_tokens - self.left)

    def append(
        self,
        key: Tensor,
        value: Tensor,
        *,
        recording: bool,
        present: Tensor | None,
        segments: Tensor | None,
        forget: bool = True,
        leading: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, WindowState]:
        """Keys and values held with these behind them, and the next state. `present` and `segments` span past and new, all of it.

        forget: whether queries continue from the state's length, so that what the window has left can go.
        leading `[B]`: with how many padded tokens each row begins, where it may begin with any: its sink tokens stand behind them.
        """
        # A graph that counted what is gone would serve few steps; there the window is a rule like any other.
        forget = forget and not torch.compiler.is_compiling()
        gone, new = self.forgettable() if forget else 0, key.shape[2]
        kept, start = self.held - gone, self.start + gone
        front = None if leading is None or not self.sink_tokens else self._rows_of_sinks(leading)
        if self._must_concatenate(recording):
            store_k, store_v = (
                torch.cat([*self._rows(store, gone, front), fresh], 2)
                for store, fresh in ((self.key, key), (self.value, value))
            )
            start = 0
        else:
            # A call that fails after this leaves its state as it was: no row that it holds is written.
            store_k, store_v = self.key, self.value
            if start + kept + new > store_k.shape[2] or (gone and self.sink_tokens):
                store_k, store_v = (self._renewed(store, gone, kept + new, front) for store in (store_k, store_v))
                start = 0
            store_k[:, :, start + kept : start + kept + new] = key
            store_v[:, :, start + kept : start + kept + new] = value
        following = replace(
            self,
            key=store_k,
            value=store_v,
            length=self.length + new,
            key_present=present,
            key_segments=segments,
            spent=False,
            shared=recording,
            start=start,
            evicted=self.evicted + gone,
        )
        keys, values = (store.narrow(2, start, kept + new) for store in (store_k, store_v))
        return keys, values, following

    def append_step(self: W, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, W] | None:
        gone = self.forgettable()
        start, kept = self.start + gone, self.held - gone
        full = self.capacity is not None and self.length >= self.capacity
        if full or start + kept >= self.key.shape[2] or not self._can_step(key, value):
            return None
        if gone and self.sink_tokens:
            self.spent = True  # they move along, over rows that this state holds: what fails now must not go on from it
            for store in (self.key, self.value):
                sinks = store[:, :, self.start : self.start + self.sink_tokens].clone()
                store[:, :, start : start + self.sink_tokens] = sinks
        self.key[:, :, start + kept : start + kept + 1] = key
        self.value[:, :, start + kept : start + kept + 1] = value
        following = self._after(self.length + 1)
        following.start, following.evicted, following.spent = start, self.evicted + gone, False
        return self.key.narrow(2, start, kept + 1), self.value.narrow(2, start, kept + 1), following

    def sinks_of(self, leading: Tensor) -> Tensor:
        """Which tokens are each row's sink tokens, `[B, sink_tokens]`, where row b begins with `leading[b]` padded ones."""
        return leading[:, None] + torch.arange(self.sink_tokens, device=leading.device)

    def _rows_of_sinks(self, leading: Tensor) -> Tensor:
        """The rows of the store, from `start` on, that hold `sinks_of`: `[B, sink_tokens]`; any row for tokens that have yet to come."""
        own = self.sinks_of(leading)
        if self.evicted:  # those that the window has left are at the front already
            column = torch.arange(self.sink_tokens, device=own.device)
            own = torch.where(own < self.sink_tokens + self.evicted, column, own - self.evicted)
        return own.clamp(max=self.held - 1)

    def _rows(self, store: Tensor, gone: int, front: Tensor | None) -> list[Tensor]:
        """The tokens held but for the oldest `gone` behind the sink tokens, which stand in rows `front`; in two pieces or one."""
        end = self.start + self.held
        if not gone:
            return [store[:, :, self.start : end]]
        sinks = self.start + self.sink_tokens
        if front is None:
            return [store[:, :, self.start : sinks], store[:, :, sinks + gone : end]]
        index = front[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3])
        return [store[:, :, self.start : end].gather(2, index), store[:, :, sinks + gone : end]]

    def _renewed(self, store: Tensor, gone: int, needed: int, front: Tensor | None) -> Tensor:
        """A store whose first rows are the kept ones of `store`, with room for `needed` and for the window to move on."""
        twice = self.sink_tokens + 2 * self.left + 2
        kept = torch.cat(self._rows(store, gone, front), 2)
        larger = store.new_empty(*store.shape[:2], max(needed, min(2 * needed, twice), 16), store.shape[3])
        larger[:, :, : kept.shape[2]] = kept
        larger[:, :, kept.shape[2] :].zero_()
        return larger

    def crop(self, length: int) -> WindowState:
        """The state after its first `length` tokens, where what it has forgotten is not in sight of the next; consumes this one."""
        self.check_crop(length)
        first = self.sink_tokens + self.evicted
        if self.evicted and length - self.left < first:
            raise UnsupportedRequest(
                f"state.crop: the window of {self.left} tokens before the next has left token {first - 1}, which is forgotten, "
                f"so the shortest length to crop to is {first + self.left}, got {length}; clone() before tokens are fed on trial"
            )
        return super().crop(length)  # type: ignore[return-value]
