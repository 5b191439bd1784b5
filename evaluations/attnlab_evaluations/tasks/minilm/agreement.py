"""Embeddings of many sentences, and how far one model's agree with another's. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab_evaluations.frame.trained_cells import Diverged
from attnlab_evaluations.tasks.compare.workloads.minilm import embeddings

BATCH = 16


def embed(model: Any, tokenizer: Any, sentences: Sequence[str]) -> Tensor:
    """`[sentences, width]`, float64, of norm 1, in the order given; sentences of like length share a batch, padded on the right.

    Raises `Diverged` where an embedding is not finite.
    """
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    rows: dict[int, Tensor] = {}
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        tokens = tokenizer(
            [sentences[i] for i in chosen], padding=True, padding_side="right", truncation=True, return_tensors="pt"
        )
        rows.update(zip(chosen, embeddings(model, tokens), strict=True))
    result = torch.stack([rows[i] for i in range(len(sentences))])
    if not result.isfinite().all():
        raise Diverged("the embeddings are not finite")
    return result


def word_embeddings(model: Any, tokenizer: Any, sentences: Sequence[str]) -> Tensor:
    """`[sentences, width]`, as `embed` from word vectors alone: no attention, no layer. The trivial level."""
    table = model.get_input_embeddings().weight.detach().double()
    tokens = tokenizer(list(sentences), truncation=True)["input_ids"]
    return torch.nn.functional.normalize(torch.stack([table[ids].mean(dim=0) for ids in tokens]), dim=-1)


def agreement(expected: Tensor, result: Tensor) -> dict[str, float]:
    """How far `result` agrees with `expected`, both `[N, E]` of norm 1.

    difference: the largest of any entry. cosine and cosine_worst: mean and least over sentences. nearest: the share of
    sentences whose nearest other sentence is the same. spearman: rank correlation of the cosines of all pairs of sentences.
    """
    cosines = (expected * result).sum(dim=-1)
    before, after = expected @ expected.mT, result @ result.mT  # [N, N]
    pairs = torch.ones_like(before, dtype=torch.bool).triu(diagonal=1)
    return {
        "difference": (expected - result).abs().max().item(),
        "cosine": cosines.mean().item(),
        "cosine_worst": cosines.min().item(),
        "nearest": (_nearest(before) == _nearest(after)).double().mean().item(),
        "spearman": spearman(before[pairs], after[pairs]),
    }


def spearman(x: Tensor, y: Tensor) -> float:
    """The correlation of ranks of two vectors, ties sharing their mean rank; NaN where one is constant."""
    return torch.corrcoef(torch.stack([_ranks(x), _ranks(y)]))[0, 1].item()


def _ranks(x: Tensor) -> Tensor:
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(dim=0).double() - (counts.double() - 1) / 2
    return ranks[place]


def _nearest(cosines: Tensor) -> Tensor:
    itself = torch.eye(len(cosines), dtype=torch.bool)
    return cosines.masked_fill(itself, -torch.inf).argmax(dim=-1)
