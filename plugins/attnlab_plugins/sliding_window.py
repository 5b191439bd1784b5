"""Softmax attention within a sliding window, with sink tokens [Beltagy et al. 2020; Xiao et al. 2023]. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attnlab import AttentionOutput, Call, InvalidInput, ScoreAttention


class SlidingWindowAttention(ScoreAttention):
    """Each query sees the keys from `left` before its position to `right` after it: Beltagy et al. 2020, "Longformer", section 3.1.

    `left` and `right` count as in `window=`: the query's own position is one more, so that `left=255, right=0` is what others call
    a causal window of 256, and `left=right=128` a symmetric one of 257. The first `sink_tokens` positions stay in sight
    (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"). What the caller hides is hidden as well.
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
    inner_product = True

    def __init__(self, *, left: int = 255, right: int = 0, sink_tokens: int = 0, **sizes: Any) -> None:
        for word, count in (("left", left), ("right", right), ("sink_tokens", sink_tokens)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InvalidInput(
                    f"sliding_window: {word} must be an int of 0 or more, which counts positions "
                    f"(a window of W with the query's own is left = W - 1), got {count!r}"
                )
        super().__init__(**sizes)
        self.left, self.right, self.sink_tokens = left, right, sink_tokens
        self.options = {"left": left, "right": right, "sink_tokens": sink_tokens}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        inside = call.within(query, key, left=self.left, right=self.right, sink_tokens=self.sink_tokens)
        return super().attend(query, key, value, inside)
