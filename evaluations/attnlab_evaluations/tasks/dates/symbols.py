"""Characters as numbers and back: vocabularies and padded batches of the dates task. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlab import InvalidInput
from attnlab_evaluations.tasks.dates.task import Example, source_letters
from attnlab_evaluations.tasks.seq2seq.model import BOS, EOS, PAD

RESERVED = 3
ISO_LETTERS = "-0123456789"


class Vocabulary:
    """Characters numbered from `RESERVED` on, after `PAD`, `BOS` and `EOS`; `size` counts all."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.size = RESERVED + len(letters)
        self._number = {letter: n for n, letter in enumerate(letters, RESERVED)}

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's characters; `InvalidInput` for one that the vocabulary lacks."""
        try:
            return [self._number[letter] for letter in text]
        except KeyError as missing:
            raise InvalidInput(
                f"dates: expected characters of {self.letters!r}, got {missing.args[0]!r} in {text!r}"
            ) from None

    def decode(self, numbers: Sequence[int]) -> str:
        """The text up to the first `EOS`; padding and `BOS` within it show as `?`."""
        result = ""
        for number in numbers:
            if number == EOS:
                break
            result += self.letters[number - RESERVED] if number >= RESERVED else "?"
        return result


def source_vocabulary() -> Vocabulary:
    """All characters that sources can hold."""
    return Vocabulary(source_letters())


def target_vocabulary() -> Vocabulary:
    """Digits and the hyphen."""
    return Vocabulary(ISO_LETTERS)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """`(numbers int64 [B, longest], lengths int64 [B])`, padded on the right with `PAD`."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows]), lengths


def batch(chosen: Sequence[Example], source: Vocabulary, target: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """`(source [B, L], lengths [B], target [B, T])`, int64; every target ends with `EOS`."""
    numbers, lengths = padded([source.encode(example.source) for example in chosen])
    expected, _ = padded([[*target.encode(example.target), EOS] for example in chosen])
    return numbers, lengths, expected


__all__ = [
    "BOS", "EOS", "PAD", "RESERVED", "Vocabulary", "batch", "padded", "source_vocabulary", "target_vocabulary",
]  # fmt: skip
