"""Additive attention: `v^T tanh(W_q q + W_k k)` [Bahdanau et al. 2014]. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnlab import InvalidInput, ScoreAttention
from attnlab.engines import additive_scores, by_blocks


class AdditiveAttention(ScoreAttention):
    """`score(q, k) = v^T tanh(W_q q + W_k k)`, Bahdanau et al. 2014, "Neural Machine Translation by Jointly Learning to Align
    and Translate", appendix A.1.2. Learned for each query head.

    Parameters: `W_q [H, A, Dq]`, `W_k [H, A, Dk]`, `v [H, A]`; A = hidden_size, by default head_dim. Query and key widths may
    differ. The default scale is 1. Tiles bound the memory: `[Lq, Lk, A]` is never formed.
    """

    name = "additive"
    formula = "additive"
    capabilities = replace(ScoreAttention.capabilities, query_dim=True, compiles=True, exports=True)

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        hidden = head_dim if hidden_size is None else hidden_size
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise InvalidInput(f"{self.name}: hidden_size must be an int of 1 or more, got {hidden!r}")
        self.options = {"hidden_size": hidden}
        self.W_q = nn.Parameter(torch.empty(num_heads, hidden, self.head_dim))
        self.W_k = nn.Parameter(torch.empty(num_heads, hidden, self.key_dim))
        self.v = nn.Parameter(torch.empty(num_heads, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the variance of a linear layer's fan-in, so that scores start near unit variance."""
        for weight in (self.W_q, self.W_k):
            nn.init.normal_(weight, std=(2 * weight.shape[-1]) ** -0.5)
        nn.init.normal_(self.v, std=self.v.shape[-1] ** -0.5)

    def default_scale(self) -> float:
        return 1.0

    def project_query(self, query: Tensor) -> Tensor:
        return query @ self.W_q.to(query.dtype).transpose(-1, -2)  # [B, H, Lq, A]

    def project_key(self, key: Tensor) -> Tensor:
        return key @ self.W_k.to(key.dtype).transpose(-1, -2)  # [B, H, Lk, A]

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return additive_scores(query, key, self.v)

    def tile_cost_of(self, query: Tensor) -> int:
        return 1 if by_blocks(query, self.v) else self.options["hidden_size"]
