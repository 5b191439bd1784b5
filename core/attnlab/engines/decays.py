"""What fades between two tokens of a chunk: nothing, one number a token, or one a key channel. Needs torch.

T are the sums of log-decays since the chunk began, in float64, as near tokens are far apart in neither and a difference of
large float32 sums would say otherwise. Every exponent is a sum between two tokens, so 0 or less.

Notation: X heads of all items; G query heads a key head; N chunks of C tokens; D key width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.engines.recomputing import recomputed

SUBCHUNK = 8  # tokens between which the decays of each channel are formed pair by pair
# e to this is 0 in every dtype, as e to -inf is, of which no difference could be taken.
FADED = -1000.0


def decays_of(log_decay: Tensor | None, dtype: torch.dtype, recording: bool) -> Decays:
    """Those of `log_decay [X, N, C]`, `[X, N, C, D]` or None, as factors of `dtype`; what is large is not kept while `recording`."""
    if log_decay is None:
        return Decays()
    return _OfTokens(log_decay, dtype) if log_decay.dim() == 3 else _OfChannels(log_decay, dtype, recording)


class Decays:
    """None: states stay as they are. x is `[X, N, C, D]`, or with query heads `[X, N, G, C, D]`."""

    def since_start(self, x: Tensor) -> Tensor:
        """x times what a state fades by from its chunk's start to a token, that token's decay included."""
        return x

    def until_end(self, x: Tensor) -> Tensor:
        """x times what a token's part of the state fades by to its chunk's end."""
        return x

    def over_chunks(self) -> Tensor | None:
        """What a state `[X, D, E]` fades by in each chunk, `[X, N, D | 1, 1]`; None where it does not fade."""
        return None

    def products(self, left: Tensor, right: Tensor, diagonal: int) -> Tensor:
        """`left_i^T e^{T_i - T_j} right_j` for `j <= i + diagonal`, 0 elsewhere: `[X, N, G, C, C]` of left `[X, N, G, C, D]`."""
        return (left @ right[:, :, None].transpose(-1, -2)).tril(diagonal)


class _OfTokens(Decays):
    def __init__(self, log_decay: Tensor, dtype: torch.dtype) -> None:
        total = log_decay.clamp(min=FADED).double().cumsum(-1)  # [X, N, C]
        self._start = total.to(dtype).exp()[..., None]
        self._end = (total[..., -1:] - total).to(dtype).exp()[..., None]
        # Above the diagonal are differences of the other sign, whose exponentials might overflow.
        self._between = (total[..., :, None] - total[..., None, :]).tril().to(dtype).exp()[:, :, None]

    def since_start(self, x: Tensor) -> Tensor:
        return x * (self._start if x.dim() == 4 else self._start[:, :, None])

    def until_end(self, x: Tensor) -> Tensor:
        return x * self._end

    def over_chunks(self) -> Tensor | None:
        return self._start[:, :, -1:]

    def products(self, left: Tensor, right: Tensor, diagonal: int) -> Tensor:
        return (left @ right[:, :, None].transpose(-1, -2) * self._between).tril(diagonal)


class _OfChannels(Decays):
    """Chunks are cut again: between two parts of a chunk decays meet at the later one's start, inside one pairs are formed."""

    def __init__(self, log_decay: Tensor, dtype: torch.dtype, recording: bool) -> None:
        self._total = log_decay.clamp(min=FADED).double().cumsum(-2)  # [X, N, C, D]
        self._dtype, self._recording = dtype, recording
        self._start = self._total.to(dtype).exp()

    def since_start(self, x: Tensor) -> Tensor:
        return x * (self._start if x.dim() == 4 else self._start[:, :, None])

    def until_end(self, x: Tensor) -> Tensor:
        return x * self._factor(self._total[:, :, -1:] - self._total)

    def over_chunks(self) -> Tensor | None:
        return self._start[:, :, -1, :, None]

    def products(self, left: Tensor, right: Tensor, diagonal: int) -> Tensor:
        total, rows = self._total, []
        size = total.shape[2]
        for a in range(0, size, SUBCHUNK):
            b = min(a + SUBCHUNK, size)
            start = total[:, :, a - 1 : a] if a else torch.zeros_like(total[:, :, :1])
            since = total[:, :, a:b] - start
            mine = left[:, :, :, a:b]
            near = (mine, right[:, :, a:b], since)
            inside = recomputed(_pair_products, *near) if self._recording else _pair_products(*near)
            inside = inside.tril(diagonal)
            parts = [inside, inside.new_zeros(*inside.shape[:-1], size - b)]
            if a:
                before = right[:, :, :a] * self._factor(start - total[:, :, :a])
                parts.insert(0, (mine * self._factor(since)[:, :, None]) @ before[:, :, None].transpose(-1, -2))
            rows.append(torch.cat(parts, -1))
        return torch.cat(rows, -2)

    def _factor(self, exponent: Tensor) -> Tensor:
        return exponent.to(self._dtype).exp()


def _pair_products(left: Tensor, right: Tensor, since: Tensor) -> Tensor:
    """Those of few tokens, channel by channel, for `since [X, N, c, D]` in float64: what lies above the diagonal says nothing."""
    ahead = torch.ones(since.shape[2], since.shape[2], dtype=torch.bool, device=since.device).triu(1)
    apart = (since[:, :, :, None] - since[:, :, None]).masked_fill(ahead[..., None], 0)  # [X, N, c, c, D]
    faded = apart.to(left.dtype).exp() * right[:, :, None]
    if torch.compiler.is_compiling():  # products of matrices would restrict a graph to lengths whose views merge
        return (left[:, :, :, :, None] * faded[:, :, None]).sum(-1)
    return torch.einsum("xngid,xnijd->xngij", left, faded)
