"""Seq2Seq: encoder, attention by name and decoder in one module. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab_evaluations.tasks.seq2seq.decoder import Decoder, DecoderOutput, DecoderState
from attnlab_evaluations.tasks.seq2seq.encoder import Encoder
from attnlab_evaluations.tasks.seq2seq.source_attention import Memory, SourceAttention

PAD, BOS, EOS = 0, 1, 2
"""Symbols that every target vocabulary begins with: padding, before the first, after the last."""


class Seq2Seq(nn.Module):
    """A recurrent encoder-decoder with any registered variant as its attention, or with none.

    Args: source_vocabulary and target_vocabulary numbers of symbols, of which 0 to 2 are `PAD`, `BOS` and `EOS`; attention a
    registered name or None; embedding_dim of both; hidden_size of the decoder and of each direction of the encoder;
    cell `gru` or `lstm`; bidirectional encoder; input_feeding (Luong et al. 2015, section 3.3); options of the variant.

    Models made from the same random state have the same encoder and decoder whatever their attention, as far as shapes
    agree: the variant's own parameters are drawn last. Raises `InvalidInput` for an unknown cell and what `attnlab.create` raises.
    """

    def __init__(
        self,
        source_vocabulary: int,
        target_vocabulary: int,
        *,
        attention: str | None = "additive",
        embedding_dim: int = 32,
        hidden_size: int = 64,
        cell: str = "gru",
        bidirectional: bool = True,
        input_feeding: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(source_vocabulary, embedding_dim, hidden_size, cell=cell, bidirectional=bidirectional)
        width = self.encoder.width
        with torch.random.fork_rng(devices=[]):  # the decoder needs its widths, and is drawn first
            context_dim = SourceAttention(attention, hidden_size, width, **options).context_dim
        self.decoder = Decoder(
            target_vocabulary,
            embedding_dim,
            hidden_size,
            memory_width=width,
            context_dim=context_dim,
            cell=cell,
            input_feeding=input_feeding,
        )
        self.attention = SourceAttention(attention, hidden_size, width, **options)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Memory, DecoderState]:
        """Memory and first state for source int64 `[B, L]` with lengths int64 `[B]`; `InvalidInput` as `Encoder`."""
        annotations, final = self.encoder(source, lengths)
        memory = self.attention.remember(annotations, final, lengths)
        return memory, self.decoder.start(memory)

    def decode(self, tokens: Tensor, state: DecoderState, memory: Memory, need_weights: bool = False) -> DecoderOutput:
        """Steps on tokens int64 `[B, T]` from a state: logits `[B, T, V]`, the next state, weights `[B, T, L]`.

        Raises `UnsupportedRequest` for weights that the variant does not declare.
        """
        output: DecoderOutput = self.decoder(tokens, state, memory, self.attention, need_weights)
        return output

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor, need_weights: bool = False) -> DecoderOutput:
        """Teacher forcing: logits `[B, T, V]` of target int64 `[B, T]`, each step given the true symbols before it."""
        memory, state = self.encode(source, lengths)
        begin = target.new_full((target.shape[0], 1), BOS)
        return self.decode(torch.cat([begin, target[:, :-1]], dim=1), state, memory, need_weights)
