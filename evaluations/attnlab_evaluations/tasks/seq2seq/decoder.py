"""The decoder: a GRU or LSTM that attends at every step, with or without input feeding. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab_evaluations.tasks.seq2seq.encoder import recurrent
from attnlab_evaluations.tasks.seq2seq.source_attention import Memory, SourceAttention


@dataclass(frozen=True)
class DecoderState:
    """Where the decoder stands: hidden `[B, D]`, the LSTM's cell `[B, D]` or None, the attentional vector `[B, D]`."""

    hidden: Tensor
    cell: Tensor | None
    attentional: Tensor

    def reorder(self, index: Tensor) -> DecoderState:
        """The items that `index` (int64 `[N]`) names, in its order."""
        cell = None if self.cell is None else self.cell.index_select(0, index)
        return DecoderState(self.hidden.index_select(0, index), cell, self.attentional.index_select(0, index))


@dataclass(frozen=True)
class DecoderOutput:
    """Of T steps: logits `[B, T, V]`, the state after them, and weights `[B, T, L]` where they were asked for."""

    logits: Tensor
    state: DecoderState
    weights: Tensor | None = None


class Decoder(nn.Module):
    """Luong et al. 2015: `h~_t = tanh(W_c [c_t; h_t])` (equation 5), logits `W_s h~_t` (equation 6).

    With input feeding `h~_{t-1}` joins the next step's input (section 3.3), so that the model knows where it looked before.
    The query is the current state h_t (section 3), not the one before as in Bahdanau et al. 2014. The first state is
    `tanh(W final)` (Bahdanau et al. 2014, appendix A.2.2, with both directions); an LSTM's first cell is 0.

    Args: vocabulary of target symbols; embedding_dim; hidden_size D; memory_width of the encoder's annotations; context_dim of
    what attention returns; cell `gru` or `lstm`; input_feeding.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding_dim: int,
        hidden_size: int,
        *,
        memory_width: int,
        context_dim: int,
        cell: str = "gru",
        input_feeding: bool = True,
    ) -> None:
        super().__init__()
        self.hidden_size, self.input_feeding = hidden_size, input_feeding
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        self.recurrent = recurrent(cell, embedding_dim + input_feeding * hidden_size, hidden_size)
        self.bridge = nn.Linear(memory_width, hidden_size)
        self.out = nn.Linear(hidden_size, vocabulary)
        # Last, as its shape may depend on the attention: all before it is drawn alike.
        self.combine = nn.Linear(context_dim + hidden_size, hidden_size, bias=False)

    def start(self, memory: Memory) -> DecoderState:
        """The state before the first step."""
        hidden = torch.tanh(self.bridge(memory.final))
        cell = torch.zeros_like(hidden) if isinstance(self.recurrent, nn.LSTM) else None
        return DecoderState(hidden, cell, torch.zeros_like(hidden))

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState,
        memory: Memory,
        attention: SourceAttention,
        need_weights: bool = False,
    ) -> DecoderOutput:
        """T steps on the symbols before each: tokens int64 `[B, T]`, T of 1 or more.

        T steps at once equal T calls of one step. Without input feeding attention is called once for all of them.
        """
        embedded = self.embedding(tokens)
        if not self.input_feeding:
            return self._advance(embedded, state, memory, attention, need_weights)
        steps = []
        for now in embedded.unbind(1):
            fed = torch.cat([now, state.attentional], dim=-1)[:, None]
            step = self._advance(fed, state, memory, attention, need_weights)
            steps.append(step)
            state = step.state
        weights = [step.weights for step in steps if step.weights is not None]
        return DecoderOutput(
            torch.cat([step.logits for step in steps], dim=1), state, torch.cat(weights, dim=1) if weights else None
        )

    def _advance(
        self, inputs: Tensor, state: DecoderState, memory: Memory, attention: SourceAttention, need_weights: bool
    ) -> DecoderOutput:
        before: Any = state.hidden[None] if state.cell is None else (state.hidden[None], state.cell[None])
        hidden, after = self.recurrent(inputs, before)  # [B, T, D]
        context, weights = attention(hidden, memory, need_weights)
        attentional = torch.tanh(self.combine(torch.cat([context, hidden], dim=-1)))
        last, cell = (after[0][0], after[1][0]) if isinstance(after, tuple) else (after[0], None)
        return DecoderOutput(self.out(attentional), DecoderState(last, cell, attentional[:, -1]), weights)
