"""Additive attention: `v^T tanh(W_q q + W_k k)` [Bahdanau et al. 2014]. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnlab import InvalidInput, ProjectedState, ScoreAttention
from attnlab.engines import additive_projection, additive_scores, additive_tile_cost


class AdditiveAttention(ScoreAttention):
    """`score(q, k) = v^T tanh(W_q q + W_k k)`, Bahdanau et al. 2014, "Neural Machine Translation by Jointly Learning to Align
    and Translate", appendix A.1.2. Learned for each query head.

    Parameters: `W_q [H, A, Dq]`, `W_k [H, A, Dk]`, `v [H, A]`; A = hidden_size, by default head_dim. Query and key widths may
    differ. The default scale is 1. Tiles bound the memory: `[Lq, Lk, A]` is never formed. Options:

    - `shared`: one set for all heads, first axis 1.
    - `bias`: `b [H, A]` is added inside tanh.
    - `weight_norm`: the vector is `g v / |v|` with a number `g [H]` (Salimans and Kingma 2016, "Weight Normalization", eq. 2),
      the normed form that decoders are often trained with. A v of zeros has no direction, and gives NaN.

    States keep `W_k k`, so that a decoding step projects its own token alone; `precompute` does that for keys that stay.
    """

    name = "additive"
    formula = "additive"
    state_type = ProjectedState
    capabilities = replace(
        ScoreAttention.capabilities, query_dim=True, compiles=True, exports=True, double_backward=True
    )
    check_options = ({"shared": True, "bias": True}, {"hidden_size": 3, "weight_norm": True})

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        hidden_size: int | None = None,
        shared: bool = False,
        bias: bool = False,
        weight_norm: bool = False,
    ) -> None:
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        hidden = head_dim if hidden_size is None else hidden_size
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise InvalidInput(f"{self.name}: hidden_size must be an int of 1 or more, got {hidden!r}")
        switches = {"shared": shared, "bias": bias, "weight_norm": weight_norm}
        for word, on in switches.items():
            if not isinstance(on, bool):
                raise InvalidInput(f"{self.name}: {word} must be True or False, got {on!r}")
        self.options = {"hidden_size": hidden, **switches}
        self.projected_width = hidden
        sets = 1 if shared else num_heads
        self.W_q = nn.Parameter(torch.empty(sets, hidden, self.head_dim))
        self.W_k = nn.Parameter(torch.empty(sets, hidden, self.key_dim))
        self.v = nn.Parameter(torch.empty(sets, hidden))
        self.b = nn.Parameter(torch.empty(sets, hidden)) if bias else None
        self.g = nn.Parameter(torch.empty(sets)) if weight_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the variance of a linear layer's fan-in, so that scores start near unit variance; b is 0 and g is |v|."""
        for weight in (self.W_q, self.W_k):
            nn.init.normal_(weight, std=(2 * weight.shape[-1]) ** -0.5)
        nn.init.normal_(self.v, std=self.v.shape[-1] ** -0.5)
        if self.b is not None:
            nn.init.zeros_(self.b)
        if self.g is not None:
            with torch.no_grad():
                self.g.copy_(self.v.norm(dim=-1))

    def default_scale(self) -> float:
        return 1.0

    def project_query(self, query: Tensor) -> Tensor:
        projected = additive_projection(query, self.W_q)  # [B, H, Lq, A]
        return projected if self.b is None else projected + self.b.to(projected.dtype)[:, None]

    def project_key(self, key: Tensor) -> Tensor:
        return additive_projection(key, self.W_k)  # [B, H, Lk, A]

    def kept_from(self) -> dict[str, Tensor]:
        return self.named_parts("W_k")

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        vector = self.v
        if self.g is not None:
            vector = vector * (self.g / vector.norm(dim=-1))[:, None]
        return additive_scores(query, key, vector.expand(self.num_heads, -1))

    def tile_cost_of(self, query: Tensor) -> float:
        return additive_tile_cost(query, self.v)
