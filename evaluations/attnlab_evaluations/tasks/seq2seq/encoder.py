"""The encoder: a GRU or LSTM over packed sequences, both ways. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnlab import InvalidInput

CELLS: dict[str, Any] = {"gru": nn.GRU, "lstm": nn.LSTM}


def recurrent(cell: str, input_size: int, hidden_size: int, bidirectional: bool = False) -> Any:
    """One recurrent layer of that name, batch first; `InvalidInput` for a name that is neither gru nor lstm."""
    if cell not in CELLS:
        raise InvalidInput(f"cell: expected {' or '.join(CELLS)}, got {cell!r}")
    return CELLS[cell](input_size, hidden_size, batch_first=True, bidirectional=bidirectional)


class Encoder(nn.Module):
    """Annotations of a source sequence: Bahdanau et al. 2014, section 3.2, equation 7 (`h_j = [forward_j; backward_j]`).

    Args: vocabulary number of source symbols; embedding_dim; hidden_size of each direction; cell `gru` or `lstm`;
    bidirectional. `width` is the width of an annotation: hidden_size times the number of directions.
    """

    def __init__(
        self, vocabulary: int, embedding_dim: int, hidden_size: int, *, cell: str = "gru", bidirectional: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        self.recurrent = recurrent(cell, embedding_dim, hidden_size, bidirectional)
        self.width = hidden_size * (1 + bidirectional)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`(annotations [B, L, width], final [B, width])`; annotations past a sequence's length are 0.

        tokens: int64 `[B, L]`, padded on the right by any symbol; lengths: int64 `[B]` on any device, 1 to L. `final` holds
        the forward state after the last symbol and the backward state after the first. What stands in the padding, and how
        much of it there is, changes nothing: sequences are packed. Raises `InvalidInput` for other shapes or lengths.
        """
        if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
            raise InvalidInput(
                f"encoder: tokens must be [B, L] and lengths [B], got {list(tokens.shape)} and {list(lengths.shape)}"
            )
        longest = tokens.shape[1]
        known = lengths.cpu()
        if known.numel() and not 1 <= int(known.min()) <= int(known.max()) <= longest:
            raise InvalidInput(f"encoder: lengths must be 1 to {longest}, got {int(known.min())} to {int(known.max())}")
        if not known.numel():
            raise InvalidInput("encoder: expected a batch of at least one sequence, got none")
        packed = pack_padded_sequence(self.embedding(tokens), known, batch_first=True, enforce_sorted=False)
        annotations, state = self.recurrent(packed)
        hidden = state[0] if isinstance(state, tuple) else state  # [directions, B, hidden_size]
        padded, _ = pad_packed_sequence(annotations, batch_first=True, total_length=longest)
        return padded, torch.cat(hidden.unbind(0), dim=-1)
