"""Multiplicative attention: Luong's four scores [Luong et al. 2015]. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnlab import InvalidInput, Reason, Request, ScoreAttention
from attnlab.engines import additive_scores, by_blocks

SCORES = ("dot", "general", "concat", "location")


class MultiplicativeAttention(ScoreAttention):
    """Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", section 3.1.

    `score` chooses, q the target state and k the source state (equation 7, then 8):

    - `"dot"`: `q^T k`; parameter-free, one width.
    - `"general"`: `q^T W_a k`, `W_a [H, Dq, Dk]`.
    - `"concat"`: `v_a^T tanh(W_a [q; k])`, `W_a [H, A, Dq + Dk]`, `v_a [H, A]`, A = hidden_size (default head_dim).
    - `"location"`: `(W_a q)_j` at source position j, `W_a [H, max_length, Dq]`; keys beyond max_length are refused, and so are
      lengths that differ, as W_a is indexed by a position that only one length fixes.

    Learned for each query head. The default scale is 1. `dot` and `general` run on torch's fused kernels where these fit.
    """

    name = "multiplicative"
    formula = "multiplicative"
    capabilities = replace(ScoreAttention.capabilities, query_dim=True, compiles=True, exports=True)

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        score: str = "general",
        hidden_size: int | None = None,
        max_length: int = 512,
    ) -> None:
        if score not in SCORES:
            raise InvalidInput(f"multiplicative: score must be one of {', '.join(SCORES)}, got {score!r}")
        for word, size in (("hidden_size", hidden_size), ("max_length", max_length)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise InvalidInput(f"multiplicative: {word} must be an int of 1 or more, got {size!r}")
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        hidden = head_dim if hidden_size is None else hidden_size
        self.score = score
        self.options = {"score": score, "hidden_size": hidden, "max_length": max_length}
        self.inner_product = score in ("dot", "general")
        if score == "dot":
            self.narrow(
                query_dim="the dot score is q^T k, which needs one width; general and concat take two"
            )
        elif score == "general":
            self.W_a = nn.Parameter(torch.empty(num_heads, self.head_dim, self.key_dim))
        elif score == "concat":
            self.W_a = nn.Parameter(torch.empty(num_heads, hidden, self.head_dim + self.key_dim))
            self.v_a = nn.Parameter(torch.empty(num_heads, hidden))
        else:
            why = "location scores source positions by W_a, whose rows one length fixes"
            self.narrow(
                cross_lengths=why,
                state=why,
                position_free=why,
                linear_memory="a score for each of max_length positions is made at once",
            )
            self.W_a = nn.Parameter(torch.empty(num_heads, max_length, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the variance of a linear layer's fan-in."""
        if self.score == "general":
            nn.init.normal_(self.W_a, std=(self.head_dim * self.key_dim) ** -0.5)
        elif self.score != "dot":
            nn.init.normal_(self.W_a, std=self.W_a.shape[-1] ** -0.5)
        if self.score == "concat":
            nn.init.normal_(self.v_a, std=self.v_a.shape[-1] ** -0.5)

    def default_scale(self) -> float:
        return 1.0

    def supports(self, request: Request) -> list[Reason]:
        reasons = super().supports(request)
        longest = self.options["max_length"]
        if self.score == "location" and request.key_length > longest:
            reasons.append(
                Reason(
                    "key_length",
                    f"{request.key_length} keys",
                    f"up to max_length={longest}",
                    "create it with a larger max_length",
                )
            )
        return reasons

    def project_query(self, query: Tensor) -> Tensor:
        if self.score == "general":
            return query @ self.W_a.to(query.dtype)  # [B, H, Lq, Dk]
        if self.score == "concat":
            return query @ self.W_a[..., : self.head_dim].to(query.dtype).transpose(-1, -2)  # [B, H, Lq, A]
        if self.score == "location":
            return query @ self.W_a.to(query.dtype).transpose(-1, -2)  # [B, H, Lq, max_length]
        return query

    def project_key(self, key: Tensor) -> Tensor:
        if self.score == "concat":
            return key @ self.W_a[..., self.head_dim :].to(key.dtype).transpose(-1, -2)  # [B, H, Lk, A]
        return key

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.score == "location":
            index = key_positions[None] if key_positions.dim() == 1 else key_positions  # [B | 1, tk]
            index = index[:, None, None, :].expand(query.shape[0], query.shape[1], query.shape[2], -1)
            return query.gather(3, index)
        if self.score == "concat":
            return additive_scores(query, key, self.v_a)
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions)

    def tile_cost_of(self, query: Tensor) -> int:
        return self.options["hidden_size"] if self.score == "concat" and not by_blocks(query, self.v_a) else 1
