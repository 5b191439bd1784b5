"""Greedy and beam decoding, in batches. Needs torch.

A model here is anything with `encode(source, lengths) -> (memory, state)` and `decode(tokens [B, 1], state, memory,
need_weights) -> output` with `output.logits [B, 1, V]`, `output.state` and `output.weights`, as `Seq2Seq` has; memory and state
have `reorder(index)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab import InvalidInput
from attnlab_evaluations.tasks.seq2seq.model import BOS, EOS, PAD


@dataclass(frozen=True)
class Decoded:
    """What greedy decoding found for a batch.

    tokens int64 `[B, T]`, `PAD` after the `EOS`; log_probability `[B]` of the whole sequence; weights `[B, T, L]`, a row for
    each token, or None.
    """

    tokens: Tensor
    log_probability: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Hypothesis:
    """One result of a beam search.

    tokens end with `EOS` where `finished`; score is the log probability, by length where that was asked for; weights
    `[T, L]` or None.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float
    finished: bool
    weights: Tensor | None = None


@torch.no_grad()
def greedy(model: Any, source: Tensor, lengths: Tensor, *, max_length: int, need_weights: bool = False) -> Decoded:
    """The most probable symbol at every step, up to `EOS` or max_length symbols.

    source int64 `[B, L]`, lengths int64 `[B]`. Raises `InvalidInput` for a max_length below 1, and `UnsupportedRequest` for
    weights that the model's variant does not declare.
    """
    _at_least_one("max_length", max_length)
    memory, state = model.encode(source, lengths)
    before = source.new_full((source.shape[0], 1), BOS)
    done = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)
    total: Tensor | float = 0.0
    tokens, weights = [], []
    for _ in range(max_length):
        output = model.decode(before, state, memory, need_weights)
        best, chosen = torch.log_softmax(output.logits[:, -1], dim=-1).max(dim=-1)
        total = total + best.masked_fill(done, 0.0)
        tokens.append(chosen.masked_fill(done, PAD))
        if output.weights is not None:
            weights.append(output.weights[:, -1])
        done, state, before = done | (chosen == EOS), output.state, chosen[:, None]
        if bool(done.all()):
            break
    assert isinstance(total, Tensor)
    return Decoded(torch.stack(tokens, dim=1), total, torch.stack(weights, dim=1) if weights else None)


@torch.no_grad()
def beam_search(
    model: Any,
    source: Tensor,
    lengths: Tensor,
    *,
    beam: int,
    max_length: int,
    length_power: float = 0.0,
    need_weights: bool = False,
) -> list[list[Hypothesis]]:
    """At most `beam` hypotheses for each item of the batch, the best first.

    Sutskever et al. 2014, "Sequence to Sequence Learning with Neural Networks", section 3.2: a hypothesis that ends leaves the
    beam, which goes on with one less, so that a beam of 1 is greedy decoding. At the end hypotheses are ordered by log
    probability over length to the power of `length_power`, where length counts the `EOS`: 0 for none, 1 for the mean. Those that
    max_length cut off are there too, with `finished` False.

    source int64 `[B, L]`, lengths int64 `[B]`. Raises as `greedy`, and `InvalidInput` for a beam below 1 or a power that is
    negative or not finite.
    """
    _at_least_one("max_length", max_length)
    _at_least_one("beam", beam)
    if not 0.0 <= length_power < math.inf:
        raise InvalidInput(f"beam_search: length_power must be 0 or more and finite, got {length_power!r}")
    batch = source.shape[0]
    memory, state = model.encode(source, lengths)
    items = torch.arange(batch, device=source.device)
    spread = items.repeat_interleave(beam)
    memory, state = memory.reorder(spread), state.reorder(spread)
    before = source.new_full((batch * beam, 1), BOS)
    total: Tensor | None = None  # [B, K] log probabilities; -inf where a place of the beam is empty
    done = torch.zeros(batch, beam, dtype=torch.bool, device=source.device)
    tokens = source.new_zeros(batch, beam, 0)
    weights: Tensor | None = None  # [B, K, t, L]
    for _ in range(max_length):
        output = model.decode(before, state, memory, need_weights)
        log_p = torch.log_softmax(output.logits[:, -1], dim=-1).view(batch, beam, -1)
        size = log_p.shape[-1]
        if total is None:  # all places hold the same beginning: one counts
            total = log_p.new_full((batch, beam), -torch.inf)
            total[:, 0] = 0.0
        going = (total[..., None] + log_p).masked_fill(done[..., None], -torch.inf)
        result, flat = going.flatten(1).topk(beam, dim=-1)
        # The places that ended stay; the others take the best continuations in order.
        rank = ((~done).cumsum(dim=-1) - 1).clamp(min=0)
        places = torch.arange(beam, device=source.device).expand(batch, beam)
        picked = flat.gather(1, rank)
        parent = torch.where(done, places, picked // size)
        token = torch.where(done, PAD, picked % size)
        total = torch.where(done, total, result.gather(1, rank))
        tokens = torch.cat([_places(tokens, parent), token[..., None]], dim=-1)
        if output.weights is not None:
            now = output.weights[:, -1].view(batch, beam, 1, -1)
            weights = now if weights is None else torch.cat([weights, now], dim=2)
            weights = _places(weights, parent)
        done = (done.gather(1, parent) | (token == EOS)) & (total > -torch.inf)  # an empty place stays open
        index = (items[:, None] * beam + parent).flatten()
        state, before = output.state.reorder(index), token.reshape(-1, 1)  # an item's places share its memory
        if bool((done | (total == -torch.inf)).all()):
            break
    assert total is not None
    return [
        _hypotheses(tokens[b], total[b], None if weights is None else weights[b], length_power) for b in range(batch)
    ]


def _places(what: Tensor, parent: Tensor) -> Tensor:
    """`what [B, K, ...]` with place k taken from place `parent[b, k]`."""
    index = parent.view(*parent.shape, *[1] * (what.dim() - 2)).expand(-1, -1, *what.shape[2:])
    return what.gather(1, index)


def _hypotheses(tokens: Tensor, total: Tensor, weights: Tensor | None, power: float) -> list[Hypothesis]:
    results = []
    for place, (row, log_p) in enumerate(zip(tokens.tolist(), total.tolist(), strict=True)):
        if log_p == -math.inf:
            continue
        finished = EOS in row
        length = row.index(EOS) + 1 if finished else len(row)
        results.append(
            Hypothesis(
                tuple(row[:length]),
                log_p / length**power,
                log_p,
                finished,
                None if weights is None else weights[place, :length],
            )
        )
    return sorted(results, key=lambda hypothesis: -hypothesis.score)


def _at_least_one(word: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidInput(f"decoding: {word} must be a whole number of 1 or more, got {number!r}")
