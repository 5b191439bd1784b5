"""Wrong variants as a newcomer writes them: what the suite tells of each is docs/failures.md. `test_failures_page.py` writes the page."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, CacheState, Call, ScoreAttention
from attnlab.engines import accumulation_dtype
from attnlab.formulas.dot_product import softmax_dot_product
from attnlab_evaluations.suite_proof.correct import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import score_definition

Shape = tuple[int, int, int, int]


class CancelsLargeTerms(ScoreAttention):
    """The tutorial's distance: |q|^2 + |k|^2 - 2 q k, which cancels far from the origin."""

    formula = "negative_distance"
    definition = score_definition(
        lambda q, k, parameters, positions: -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1),
        lambda q, k: 1.0,
    )

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        query, key = query.to(wide), key.to(wide)
        both = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :]
        return 2 * query @ key.transpose(-1, -2) - both


class InvertsTheMask(TextbookAttention):
    """True is taken for hidden, as `nn.MultiheadAttention` has it."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        mask = None if call.visibility is None else call.visibility.allowed
        return seen if mask is None else super().visible(Call(), shape, device) & ~mask


class ScalesTwice(TextbookAttention):
    """Queries are divided by sqrt(d) before the product, and scores after it."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) / math.sqrt(q.shape[-1])


class ReadsPadding(TextbookAttention):
    """Absent keys hold 0 when `attend` is called, and still take part in the softmax."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.visibility is not None and call.visibility.key_present is not None and not call.visibility.positional:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class WindowIsOffByOne(TextbookAttention):
    """A window of `left` keys that counts the query's own."""

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        left = None if call.visibility is None else call.visibility.left
        if left is None or call.visibility is None or not isinstance(call.visibility.offset, int):
            return seen
        rows = torch.arange(shape[2], device=device) + call.visibility.offset
        return seen & (rows[:, None] - torch.arange(shape[3], device=device) < max(left, 1))


class ReturnsLseInBaseTwo(TextbookAttention):
    """The logarithm that a kernel works in."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return weights, lse / math.log(2)


class BufferState(CacheState):
    """A state whose clone is itself."""

    def clone(self) -> Any:
        return self.renewed()


class SharesItsState(TextbookAttention):
    """States write into one buffer of 64 tokens, which a clone shares."""

    state_type = BufferState

    def init_state(self, batch: int, capacity: int | None = None, device: Any = None, dtype: Any = None) -> CacheState:
        return BufferState(**vars(super().init_state(batch, capacity, device, dtype)))

    def remember(self, key: Tensor, value: Tensor, call: Call) -> Any:
        if call.recording or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
            return super().remember(key, value, call)
        assert isinstance(call.state, CacheState)
        past, new = call.state.length, key.shape[2]
        parts = []
        for held, x in ((call.state.key, key), (call.state.value, value)):
            if held.shape[2] < past + new:
                held = torch.cat([held[:, :, :past], x.new_zeros(*x.shape[:2], new + 64, x.shape[3])], 2)
            held[:, :, past : past + new] = x
            parts.append(held)
        _, _, state = super().remember(key, value, call)
        state.key, state.value = parts
        return parts[0][:, :, : past + new], parts[1][:, :, : past + new], state


class GroupsInTurns(TextbookAttention):
    """Query head h reads key/value head h % Hkv."""

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.num_heads // self.num_kv_heads, 1, 1)


class SumsInHalfPrecision(TextbookAttention):
    """Weighted values are summed in the dtype of the query, tile by tile."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        half = self._half
        if half is None:
            return super().mixed(weights, v, visible)
        total = torch.zeros(*weights.shape[:3], v.shape[-1], dtype=half)
        for start in range(0, v.shape[2], 16):
            total = total + (weights[..., start : start + 16] @ v[:, :, start : start + 16]).to(half)
        return total

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self._half = query.dtype if query.dtype in (torch.bfloat16, torch.float16) else None
        return super().attend(query, key, value, call)


class KeepsMasksByIdentity(TextbookAttention):
    """What a mask tensor allowed is kept by its address, though the tensor may be written to."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._kept: dict[int, Any] = {}

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        mask = None if call.visibility is None else call.visibility.allowed
        if mask is None or torch.compiler.is_compiling():
            return super().visible(call, shape, device)
        if mask.data_ptr() not in self._kept:
            self._kept[mask.data_ptr()] = mask, super().visible(call, shape, device)
        return self._kept[mask.data_ptr()][1]


def tempered(query: Tensor, key: Tensor, value: Tensor, *, options: Any, scale: float | None, **rest: Any) -> Any:
    """Definition: softmax of `scale q k / temperature`."""
    scale = (key.shape[-1] ** -0.5 if scale is None else scale) / options["temperature"]
    return softmax_dot_product(query, key, value, options=options, scale=scale, **rest)


class IgnoresAnOption(ScoreAttention):
    """`temperature` is validated, kept in `options`, and used nowhere."""

    formula = "tempered"
    definition = staticmethod(tempered)
    check_options = ({"temperature": 3.0},)

    def __init__(self, *, temperature: float = 1.0, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"temperature": temperature}

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)


MISTAKES = (
    (CancelsLargeTerms, "Large terms that cancel"),
    (InvertsTheMask, "A mask that is inverted"),
    (ScalesTwice, "A scale that is applied twice"),
    (ReadsPadding, "Padding that takes part"),
    (WindowIsOffByOne, "A window that is off by one"),
    (ReturnsLseInBaseTwo, "An lse in base 2"),
    (SharesItsState, "A state that is shared"),
    (GroupsInTurns, "Groups in the wrong order"),
    (SumsInHalfPrecision, "Sums in half precision"),
    (KeepsMasksByIdentity, "A mask that is kept by its identity"),
    (IgnoresAnOption, "An option that is ignored"),
)
"""Each mistake and its name."""
