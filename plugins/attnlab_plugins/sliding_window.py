"""Softmax attention within a sliding window, with sink tokens [Beltagy et al. 2020; Xiao et al. 2023]. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, InvalidInput, ScoreAttention, State, UnsupportedRequest, WindowState
from attnlab.engines import FastPath, fused_step


class _Step(FastPath):
    """One token by torch's function, against a cache that holds what the window shows and nothing else."""

    def step(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
        fits = isinstance(state, WindowState) and variant._made(state)
        return fused_step(query, key, value, state) if fits else None


class SlidingWindowAttention(ScoreAttention):
    """Each query sees the keys from `left` before its position to `right` after it: Beltagy et al. 2020, "Longformer", section 3.1.

    `left` and `right` count as in `window=`: the query's own position is one more, so that `left=255, right=0` is what others call
    a causal window of 256, and `left=right=128` a symmetric one of 257. The first `sink_tokens` positions stay in sight
    (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"); they count from the row's first present key,
    so that a row with padding on its left is the row alone. What the caller hides is hidden as well.
    Time and memory grow with length times window. Lengths differ only through a state, which says where its queries stand; for
    others `dot_product` with `window=` and `offset=` says it in the call. Parameter-free.
    """

    name = "sliding_window"
    formula = "sliding_window"
    capabilities = replace(
        ScoreAttention.capabilities,
        position_free=False,
        cross_lengths=False,
        compiles=True,
        exports=True,
        notes={"cross_lengths": "its window would have two readings; dot_product takes window= with offset="},
    )
    state_type = WindowState
    zeroes_absent_rows = True
    inner_product = True
    fast_path = _Step()
    check_options = (
        {"left": 3},
        {"left": 2, "right": 1},
        {"left": 3, "sink_tokens": 2},
        {"left": 1, "right": 2, "sink_tokens": 1},
    )

    def __init__(self, *, left: int = 255, right: int = 0, sink_tokens: int = 0, **sizes: Any) -> None:
        for word, count in (("left", left), ("right", right), ("sink_tokens", sink_tokens)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidInput(
                    f"sliding_window: {word} must be an int of 0 or more, which counts positions "
                    f"(a window of W with the query's own is left = W - 1), got {count!r}"
                )
        super().__init__(**sizes)
        self.left, self.right, self.sink_tokens = left, right, sink_tokens
        self.shift_invariant = not sink_tokens  # which count from where a sequence begins
        self.options = {"left": left, "right": right, "sink_tokens": sink_tokens}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        inside = call.within(query, key, left=self.left, right=self.right, sink_tokens=self.sink_tokens)
        if call.state is None:
            return super().attend(query, key, value, inside)
        key, value, state = self.extended(key, value, call)
        first, leading = self.sink_tokens, self._leading(call)
        front = None if leading is None else state.sinks_of(leading)
        result = super().attend(query, key, value, inside.without_keys(first, first + state.evicted, front))
        return result._replace(state=state)

    def _leading(self, call: Call) -> Tensor | None:
        """The number of padded tokens at the start of each item, where that moves its sink tokens."""
        return None if not self.sink_tokens or call.visibility is None else call.visibility.leading

    def extended(self, key: Tensor, value: Tensor, call: Call, **further: Any) -> tuple[Tensor, Tensor, WindowState]:
        """The keys and values with those of the state; the state drops what no later query can see, if queries continue from it."""
        state, visibility = call.state, call.visibility
        assert isinstance(state, WindowState)
        assert visibility is not None
        if not self._made(state):
            raise InvalidInput(
                f"{self.name}: the state was made for left={state.left}, sink_tokens={state.sink_tokens} and this variant has "
                f"left={self.left}, sink_tokens={self.sink_tokens}; use its own init_state"
            )
        continues = (
            visibility.query_segments is None
            and isinstance(visibility.offset, int)
            and visibility.offset >= state.length
        )
        if state.evicted and not continues:
            raise UnsupportedRequest(
                f"{self.name}: its state has forgotten what the window had left, so queries must continue from its length, "
                f"{state.length}; leave offset out, or give it from the first call on, and nothing is forgotten"
            )
        return super().extended(key, value, call, forget=continues, leading=self._leading(call), **further)  # type: ignore[return-value]

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> WindowState:
        """An empty cache of the keys and values inside the window, which bounds its memory; `capacity` bounds its number of tokens."""
        return WindowState.for_window(
            self.left, self.sink_tokens, batch, self.num_kv_heads, self.key_dim, self.value_dim, capacity, device, dtype
        )

    def _made(self, state: WindowState) -> bool:
        return state.left == self.left and state.sink_tokens == self.sink_tokens
