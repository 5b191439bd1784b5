"""Mutants that the checks in `checks/sizes.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.mutants._shared import before_validation


class ServesBatchesBySlices(TextbookAttention):
    """Batches go through in slices of 4096, whose number is rounded down: the last rows stay 0."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        rows = out.shape[0]
        if rows <= 4096:
            return out
        return out.masked_fill(torch.arange(rows, device=out.device)[:, None, None, None] >= rows // 4096 * 4096, 0)


class CountsRowsInSixteenBits(TextbookAttention):
    """The index of batch and head is kept in 16 bits and starts again at 0 beyond 65535."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        out = super().mixed(weights, v, visible)
        flat = out.flatten(0, 1)
        index = torch.arange(flat.shape[0], device=flat.device) % 2**16
        return flat[index].reshape(out.shape)


def _read_in_32_bits(named: dict[str, Any]) -> None:
    for name in ("query", "key", "value"):
        x = named[name]
        index = torch.zeros((), dtype=torch.int32)
        for size, stride in zip(x.shape, x.stride(), strict=True):
            steps = torch.arange(size, dtype=torch.int64) * stride
            index = index.unsqueeze(-1) + _wrapped(steps)
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        where = (_wrapped(index.long() + x.storage_offset()).long() % memory.shape[0]).to(x.device)
        named[name] = memory[where]


def _wrapped(offsets: Tensor) -> Tensor:
    """Offsets as a signed 32-bit integer holds them."""
    return ((offsets + 2**31) % 2**32 - 2**31).to(torch.int32)


@before_validation(_read_in_32_bits)
class IndexesIn32Bits(TextbookAttention):
    """Offsets into memory are computed in 32 bits."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ServesBatchesBySlices, "large_batches_equal_small_batches", "rows past the last whole slice stay 0"),
    Mutant(CountsRowsInSixteenBits, "large_batches_equal_small_batches", "batch times heads wraps at 65536"),
    Mutant(IndexesIn32Bits, "offsets_beyond_32_bits", "offsets wrap at 2^31"),
)
