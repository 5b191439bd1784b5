"""A short causal convolution over projected queries, keys and values, and the state that carries it on. Needs torch.

Notation: B batch, L tokens of the call, C channels, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from attnlab._quoting import quoted
from attnlab.engines.heads import accumulation_dtype
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.state import State


@dataclass(kw_only=True, eq=False)
class ConvolvedState(State):
    """The state of a variant, `inner`, and `history [B, K-1, C]`: what the last tokens that were present projected to, oldest first."""

    named_only: ClassVar[bool] = True  # a variant takes the inner one
    inner: State
    history: Tensor

    def followed(self, inner: State | None, history: Tensor) -> ConvolvedState:
        """The state after a call that `inner` and `history` came of; this one is spent."""
        assert inner is not None
        self.spend("MultiHeadAttention")
        return ConvolvedState(length=inner.length, inner=inner, history=history)

    def clone(self) -> ConvolvedState:
        return replace(super().clone(), inner=self.inner.clone())

    def to(self, device: torch.device | str) -> ConvolvedState:
        return replace(super().to(device), inner=self.inner.to(device))

    def detach(self) -> ConvolvedState:
        return replace(super().detach(), inner=self.inner.detach())

    def reorder(self, index: Tensor) -> ConvolvedState:
        return replace(super().reorder(index), inner=self.inner.reorder(index))

    def crop(self, length: int) -> ConvolvedState:
        """Refused: the projections before the last few tokens are gone, whatever the variant keeps."""
        raise UnsupportedRequest(
            "state.crop: the short convolution keeps its last inputs alone; clone() before the tokens to forget are fed"
        )


class ShortConvolution(nn.Module):
    """`y_t = SiLU(sum_i w[:, K-1-i] x_{t-i})`, i from 0 to K-1: each channel by itself, from a token and those before it.

    As in Gu and Dao 2023, "Mamba", section 3.4, and Yang et al. 2024, "Gated Delta Networks", section 3.4. Padded tokens are left out,
    wherever they stand: the last that was present comes before the next. Segments begin with nothing before them.
    Parameter `weight [C, K]`. Sums are float32 or better.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(
                f"MultiHeadAttention: conv_size must be an int of 1 or more, or None, got {quoted(size)}"
            )
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within `K^-0.5`, as `nn.Conv1d` has it."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def begin(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """The history `[B, K-1, C]` before the first token: zeros."""
        channels, size = self.weight.shape
        return torch.zeros(batch, size - 1, channels, device=device, dtype=dtype)

    def over(
        self, parts: Sequence[Tensor], state: ConvolvedState | None, present: Tensor | None, segments: Any
    ) -> tuple[Sequence[Tensor], Tensor]:
        """`parts`, `[B, L, *]` each, convolved as the channels of one input, and the history after them.

        segments: those of a call, of which the keys' count; what does not fit is left to the validation of the request, which names it.
        """
        x = torch.cat(list(parts), -1)
        ids = segments[1] if isinstance(segments, (tuple, list)) and len(segments) == 2 else None
        fits = isinstance(ids, Tensor) and ids.shape == x.shape[:2] and not ids.is_floating_point()
        history = self.begin(x.shape[0], x.device, x.dtype) if state is None else self._history(state, x)
        y, history = self(x, history, present, ids if fits else None)
        return y.split([part.shape[-1] for part in parts], -1), history

    def _history(self, state: ConvolvedState, x: Tensor) -> Tensor:
        state.check("MultiHeadAttention", x.shape[0], 0, 0, 0, x.shape[1], x)
        channels, size = self.weight.shape
        if state.history.shape[1:] != (size - 1, channels):
            raise InvalidInput(
                f"MultiHeadAttention: the state has a history {list(state.history.shape[1:])} and conv_size={size} of this module "
                f"goes on from {[size - 1, channels]}; use its own init_state"
            )
        return state.history

    def forward(
        self, x: Tensor, history: Tensor, present: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(y [B, L, C], history after the last token)` of `x [B, L, C]`; y is 0 where `present [B, L]`, bool, is False.

        segments: integers `[B, L]`, of which the history is of no use to a later call.
        """
        length, size = x.shape[1], self.weight.shape[1]
        order = _order(present, segments)
        tokens = x if order is None else _taken(x, order)
        ids = None if segments is None or order is None else segments.gather(1, order)
        whole = torch.cat([history.to(x.dtype), tokens], 1)  # [B, K-1 + L, C]
        weight = self.weight.to(accumulation_dtype(x.dtype))
        y = torch.zeros_like(tokens, dtype=weight.dtype)
        for i in range(size):
            tap, back = whole[:, i : i + length], size - 1 - i
            if ids is not None and back:
                other = pad(ids, (back, 0), value=-1)[:, :length] != ids
                tap = tap.masked_fill(other[..., None], 0)
            y = y + tap * weight[:, i]
        y = silu(y).to(x.dtype)
        y = y if order is None else _taken(y, order.argsort(1))
        if present is None:
            return y, whole[:, length:].clone()
        last = present.sum(1, keepdim=True) + torch.arange(size - 1, device=x.device)  # [B, K-1]
        return y.masked_fill(~present[..., None], 0), _taken(whole, last)


def require_convolvable(query: Any, key: Any, value: Any, state: Any, part: Callable[[str], Any]) -> None:
    """`InvalidInput` unless one sequence attends to itself, causally, and goes on from a state that has a history.

    part: the value of a visibility argument by its name.
    """
    if (key is not None and key is not query) or (value is not None and value is not query):
        raise InvalidInput(
            "MultiHeadAttention: conv_size is for self-attention, where query, key and value are one sequence; leave out key "
            "and value, or make the module without conv_size"
        )
    if part("causal") is not True:
        raise InvalidInput(
            "MultiHeadAttention: conv_size convolves each token with those before it, for causal attention; "
            "give causal=True, or make the module without conv_size"
        )
    if state is None:
        return
    if not isinstance(state, ConvolvedState):
        raise InvalidInput(
            f"MultiHeadAttention: state must be one from this module's own init_state, got a {type(state).__name__}"
        )
    if part("segments") is not None:
        raise InvalidInput(
            "MultiHeadAttention: with conv_size a state has the history of one sequence, not of packed segments; "
            "give key_mask or key_lengths in the place of segments"
        )


def _order(present: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """Indices `[B, L]` that bring tokens of one segment beside each other, in their order, padded ones last."""
    if segments is None:
        return None if present is None else (~present).byte().argsort(dim=1, stable=True)
    ids = segments.long()
    if present is not None:
        ids = ids.masked_fill(~present, torch.iinfo(torch.int64).max)
    return ids.argsort(dim=1, stable=True)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
