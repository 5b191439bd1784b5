"""What the decoder reads of the source: any registered variant as cross-attention, or nothing. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import attnlab
from attnlab import Attention, GateProjections, PrecomputedKeys, ScoreAttention, UnsupportedRequest
from attnlab.engines import unit_length


@dataclass(frozen=True)
class Memory:
    """The source as the decoder sees it, made once for a batch.

    key `[B, 1, L, Dk]`, or what the variant made of it, value `[B, 1, L, Dv]`, lengths int64 `[B]`, gates by name, final `[B, width]`.
    """

    key: Tensor | PrecomputedKeys
    value: Tensor
    lengths: Tensor
    final: Tensor
    gates: dict[str, Tensor] = field(default_factory=dict)

    def reorder(self, index: Tensor) -> Memory:
        """The items that `index` (int64 `[N]`) names, in its order; one may come more than once."""
        gates = {name: gate.index_select(0, index) for name, gate in self.gates.items()}
        value, lengths, final = (part.index_select(0, index) for part in (self.value, self.lengths, self.final))
        key = self.key.reorder(index) if isinstance(self.key, PrecomputedKeys) else self.key.index_select(0, index)
        return Memory(key, value, lengths, final, gates)


class SourceAttention(nn.Module):
    """One head of a registered variant over the encoder's annotations.

    Args: variant a registered name, or None for no attention; query_dim the decoder's width; width of the annotations; options
    of the variant. A variant that declares `query_dim` gets the annotations as keys; for others a linear map brings them to
    the decoder's width, and values too where the variant declares no `value_dim`. Gates that it declares are projected from
    the annotations; queries and keys have unit length where it asks for that. Raises what `attnlab.create` raises.

    Without attention the context is the encoder's final state at every step: Cho et al. 2014, "Learning Phrase Representations
    using RNN Encoder-Decoder", section 2.2. All other parameters are then the same as with attention.
    """

    attention: Attention | None

    def __init__(self, variant: str | None, query_dim: int, width: int, **options: Any) -> None:
        super().__init__()
        self.query_dim, self.width = query_dim, width
        self.attention = None
        self.key_projection: nn.Module = nn.Identity()
        self.context_dim = width
        self.gate_projections: GateProjections | None = None
        self.projected = False
        self.shared_value = False
        self.unit_length = False
        if variant is None:
            return
        with torch.random.fork_rng(devices=[]):  # a look at what this instance declares draws nothing
            able = attnlab.create(variant, num_heads=1, head_dim=query_dim, **options).capabilities
        self.projected = width != query_dim and not able.query_dim
        key_dim = query_dim if self.projected else width
        self.shared_value = key_dim != width and not able.value_dim
        self.context_dim = key_dim if self.shared_value else width
        self.attention = attnlab.create(
            variant, num_heads=1, head_dim=query_dim, key_dim=key_dim, value_dim=self.context_dim, **options
        )
        if self.projected:
            self.key_projection = nn.Linear(width, query_dim, bias=False)
        if self.attention.gates:
            self.gate_projections = GateProjections(self.attention, width)
        self.unit_length = self.attention.qk_l2norm

    def remember(self, annotations: Tensor, final: Tensor, lengths: Tensor) -> Memory:
        """The memory of annotations `[B, L, width]`, final `[B, width]` and lengths `[B]`."""
        annotations = annotations.contiguous()  # once, not in every call: packing leaves time-major strides
        key = self.key_projection(annotations)[:, None]
        value = key if self.shared_value else annotations[:, None]
        gates = {} if self.gate_projections is None else self.gate_projections(annotations)
        if self.unit_length:
            key = unit_length(key)
        known: Tensor | PrecomputedKeys = key
        if isinstance(self.attention, ScoreAttention):  # its work on the keys is the same at every step
            known = self.attention.precompute(key, key_lengths=lengths)
        return Memory(known, value, lengths.to(annotations.device), final, gates)

    def forward(self, query: Tensor, memory: Memory, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """`(context [B, T, context_dim], weights [B, T, L] or None)` for queries `[B, T, query_dim]`.

        Raises `UnsupportedRequest` where weights are needed and there is no attention, or the variant declares none.
        """
        if self.attention is None:
            if need_weights:
                raise UnsupportedRequest(
                    "seq2seq: expected a variant to return the weights of, got a model without attention; "
                    "create it with attention='additive' or another"
                )
            return memory.final[:, None].expand(-1, query.shape[1], -1), None
        if self.unit_length:
            query = unit_length(query)
        more: dict[str, Any] = {"key_lengths": memory.lengths, "need_weights": need_weights}
        if memory.gates:
            more["gates"] = memory.gates
        if isinstance(memory.key, PrecomputedKeys):
            result = memory.key(query[:, None], memory.value, **more)
        else:
            result = self.attention(query[:, None], memory.key, memory.value, **more)
        weights = None if result.weights is None else result.weights[:, 0]
        return result.out[:, 0], weights
