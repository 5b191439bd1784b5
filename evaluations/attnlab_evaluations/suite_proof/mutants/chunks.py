"""Mutants of a recurrence that takes its tokens chunk by chunk. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnlab.engines.chunked_recurrence import chunked_recurrence
from attnlab_evaluations.suite_proof.mutants._sums import TextbookGatedDelta
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant

Gates = Mapping[str, Tensor]
CHUNK = 16


class TextbookChunkedDelta(TextbookGatedDelta):
    """Chunks of 16 tokens by the engine, correct; each mutant errs in what one chunk hands to the next, or in what it solves."""

    def scan(
        self,
        memory: Tensor,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        gates: Gates,
        present: Tensor | None,
        *,
        recording: bool,
    ) -> tuple[Tensor | None, Tensor]:
        beta, decay = gates["beta"], gates["log_decay"]
        if present is not None:
            gone = ~present[:, None, :]
            key, value = (x.masked_fill(gone[..., None], 0) for x in (key, value))
            beta, decay = beta.masked_fill(gone, 0), decay.masked_fill(gone, 0)
        outs = []
        for start in range(0, key.shape[2], CHUNK):
            at = slice(start, start + CHUNK)
            some = None if query is None else query[:, :, :, at]
            out, memory = self.chunk(memory, some, key[:, :, at], value[:, :, at], beta[:, :, at], decay[:, :, at])
            outs.append(out)
        return (torch.cat(outs, 3) if query is not None else None), memory  # type: ignore[arg-type]

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return chunked_recurrence(memory, query, key, value, beta=beta, log_decay=decay, corrects=True)


class CorrectsInsideChunksOnly(TextbookChunkedDelta):
    """What the memory held before the chunk is not recalled when the chunk's tokens are written."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        out, fresh = super().chunk(torch.zeros_like(memory), query, key, value, beta, decay)
        kept = decay.cumsum(-1).exp()
        if out is not None and query is not None:
            out = out + (query * kept[:, :, None, :, None]) @ memory[:, :, None]
        return out, fresh + memory * kept[..., -1:, None]


class MemoryKeepsItsDecay(TextbookChunkedDelta):
    """A chunk reads the memory faded, and hands it on as it was."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        out, following = super().chunk(memory, query, key, value, beta, decay)
        return out, following + memory * (1 - decay.sum(-1).exp())[..., None, None]


class BetaOutsideTheSystem(TextbookChunkedDelta):
    """`(1 + M) u = beta v` is solved, without the beta before M: tokens of a chunk recall each other whole."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        fading, one = decay.cumsum(-1), torch.ones_like(beta)
        held = (key * fading.exp()[..., None]) @ memory  # what the chunk's keys read of the memory before
        target = beta[..., None] * (value - held) + held
        return super().chunk(memory, query, key, target, one, decay)


class FadesByTheFirstToken(TextbookChunkedDelta):
    """Every token of a chunk fades by the gate of the chunk's first."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return super().chunk(memory, query, key, value, beta, decay[..., :1].expand_as(decay))


MUTANTS = (
    Mutant(CorrectsInsideChunksOnly, "agrees_with_definition", "a chunk ignores what was held before it"),
    Mutant(MemoryKeepsItsDecay, "chunks_equal_the_whole", "the memory does not fade from chunk to chunk"),
    Mutant(BetaOutsideTheSystem, "agrees_with_definition", "beta is left out of the chunk's system"),
    Mutant(FadesByTheFirstToken, "agrees_with_definition", "one gate for a whole chunk"),
)
