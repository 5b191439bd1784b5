"""A single head of any variant as an associative memory: written with pairs, asked by key. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnlab
from attnlab import Attention, GateProjections, UnsupportedRequest
from attnlab.engines import unit_length
from attnlab_evaluations.tasks.capacity.task import Sequences


class AssociativeMemory(nn.Module):
    """`count` keys and values; the variant's key is `W_k [v; k]`, its query `W_q k`, its value the one-hot v itself.

    A key k is a row of a normal table of width `2.2 count`, a value v is one-hot; neither is learned. W_k and W_q (with biases)
    are, and so are the variant's parameters and projections of the gates that it declares, from `[v; k]`, sigmoid for `(0,1)` and
    log-sigmoid for `<=0`. All keys are asked after the last pair, by one call without `causal`.

    A variant of the recurrent family, or with gates, gets keys and queries of unit length: attnlab's delta rule is defined on those,
    and does not divide features by their sum as Schlag et al. do. Its scale is 1, where it takes one, so that a key reads back what
    was written under it; by default a read is divided by the root of the width, and the loss stays at .28 at width 16.

    Table, W_k and W_q are drawn before all else: models made from one random state start from the same, whatever the variant.

    Raises what `attnlab.create` raises, and `UnsupportedRequest` where the variant ties queries to places among the keys.
    """

    table: Tensor

    def __init__(self, variant: str, options: dict[str, Any], *, count: int, width: int) -> None:
        super().__init__()
        embedding = count * 22 // 10
        self.count, self.width = count, width
        self.register_buffer("table", torch.randn(count, embedding))
        self.key_projection = nn.Linear(count + embedding, width)
        self.query_projection = nn.Linear(embedding, width)
        for projection in (self.key_projection, self.query_projection):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
        made = attnlab.create(variant, num_heads=1, head_dim=width, value_dim=count, **options)
        if not made.capabilities.cross_lengths:
            raise UnsupportedRequest(
                f"{made.name} declares no cross lengths, so its queries stand among the keys; capacity asks after the last"
            )
        if not (made.capabilities.position_free or made.family == "recurrent"):
            raise UnsupportedRequest(
                f"{made.name} weighs keys by their places, which a question asked after the last pair has not"
            )
        self.attention: Attention = made
        self.unit_length = bool(made.gates) or made.family == "recurrent"
        self.gate_projections = GateProjections(made, count + embedding)

    def forward(self, written: Sequences) -> Tensor:
        """`[B, N, N]`: for each of the N keys what the memory answers, once the sequences are written."""
        v = F.one_hot(written.values, self.count).to(self.table)  # [B, L, N]
        pairs = torch.cat([v, self.table[written.keys]], -1)  # [B, L, N + E]
        key = self.key_projection(pairs)[:, None]  # [B, 1, L, D]
        query = self.query_projection(self.table).expand(len(v), 1, -1, -1)  # [B, 1, N, D]
        if self.unit_length:
            key, query = unit_length(key), unit_length(query)
        gates = self.gate_projections(pairs)
        scale = 1.0 if self.unit_length and self.attention.capabilities.scale else None
        out: Tensor = self.attention(query, key, v[:, None], gates=gates or None, scale=scale).out
        return out[:, 0]  # [B, 1, N, N] -> [B, N, N]
