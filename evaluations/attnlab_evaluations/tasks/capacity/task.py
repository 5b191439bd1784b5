"""Sequences of associations, and what a memory of them must answer. Needs torch.

There are N keys and N values. `capacity`: every key once, in random order, and every value once. `overwrite`: 2 N pairs, keys and
values drawn with replacement; the last value of a key is the right one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

CAPACITY, OVERWRITE = "capacity", "overwrite"
VERSION = 1
"""Grows when the sequences of a seed, or what is asked of them, change; it is part of every record's key."""
TRIVIAL_LOSS = 0.5
"""Of a memory that answers nothing: half the squared length of a one-hot value."""


@dataclass(frozen=True)
class Sequences:
    """A batch of sequences of length L, as numbers of keys and values in 0..N-1, and the answer for each of the N keys.

    keys, values `[B, L]`; answers `[B, N]` the last value of each key; held `[B, N]` whether the key is in the sequence at all.
    """

    keys: Tensor
    values: Tensor
    answers: Tensor
    held: Tensor


def length(setting: str, count: int) -> int:
    """Pairs in a sequence over `count` keys."""
    return count if setting == CAPACITY else 2 * count


def stream(setting: str, count: int, seed: int, name: str) -> torch.Generator:
    """A source of sequences of its own for each name: `training`, `evaluation 100`, ... The variant has no part in it."""
    text = f"capacity {setting} {count} {seed} {name}"
    return torch.Generator().manual_seed(random.Random(text).getrandbits(63))


def draw(setting: str, count: int, batch: int, generator: torch.Generator) -> Sequences:
    """The next `batch` sequences over `count` keys."""
    shape = (batch, length(setting, count))
    if setting == CAPACITY:
        keys, values = (torch.rand(shape, generator=generator).argsort(-1) for _ in range(2))
    else:
        keys, values = (torch.randint(count, shape, generator=generator) for _ in range(2))
    return answered(keys, values, count)


def answered(keys: Tensor, values: Tensor, count: int) -> Sequences:
    """The sequences `keys, values [B, L]` over `count` keys, with their answers."""
    places = torch.arange(keys.shape[1]).expand_as(keys)
    last = torch.full((keys.shape[0], count), -1).scatter_reduce(1, keys, places, "amax")
    return Sequences(keys, values, values.gather(1, last.clamp(min=0)), last >= 0)


def loss(out: Tensor, batch: Sequences) -> Tensor:
    """Half the squared error of `out [B, N, N]`, a value for each key, to the one-hot answers; mean over the keys held."""
    expected = torch.nn.functional.one_hot(batch.answers, out.shape[-1]).to(out.dtype)
    error = 0.5 * (out - expected).square().sum(-1)  # [B, N]
    return error[batch.held].mean()


def accuracy(out: Tensor, batch: Sequences) -> float:
    """The share of the keys held for which the largest of the N numbers in `out [B, N, N]` is the right value's."""
    right = out.argmax(-1) == batch.answers
    return right[batch.held].double().mean().item()
