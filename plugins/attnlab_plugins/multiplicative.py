"""Multiplicative attention: Luong's four scores [Luong et al. 2015]. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnlab import AttentionOutput, Call, InvalidInput, ProjectedState, ScoreAttention, Visibility
from attnlab.engines import (
    accumulation_dtype,
    additive_projection,
    additive_scores,
    additive_tile_cost,
    in_own_precision,
)

SCORES = ("dot", "general", "concat", "location")
LOCAL = (None, "m", "p")


class MultiplicativeAttention(ScoreAttention):
    """Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", section 3.1.

    `score` chooses, q the target state and k the source state (equation 7, then 8):

    - `"dot"`: `q^T k`; parameter-free, one width.
    - `"general"`: `q^T W_a k`, `W_a [H, Dq, Dk]`.
    - `"concat"`: `v_a^T tanh(W_a [q; k])`, `W_a [H, A, Dq + Dk]`, `v_a [H, A]`, A = hidden_size (default head_dim).
    - `"location"`: `(W_a q)_j` at source position j, counted from the row's first present key, `W_a [H, max_length, Dq]`; keys beyond max_length are refused, and so are
      lengths that differ, as W_a is indexed by a position that only one length fixes.

    `local` chooses which keys a query reads (section 3.2), D = half_width:

    - None: all that the caller shows, global attention.
    - `"m"`, local-m: those from D before its own position to D after it, `p_t = t`: a decoder that calls step by step says
      `offset=t`, and one that calls for all steps at once need say nothing.
    - `"p"`, local-p: those within D of a predicted position, weights times a Gaussian of deviation D / 2 around it (eq. 9 and 10),
      not normalised again; `W_p [H, A, Dq]`, `v_p [H, A]`. The sentence that eq. 9 measures by S is, for each query, from the
      first to the last key that the caller's masks and bias let it see: the source without its padding, or a causal query's past.

    Learned for each query head. The default scale is 1. `dot` and `general` run on torch's fused kernels where these fit.
    """

    name = "multiplicative"
    formula = "multiplicative"
    zeroes_absent_rows = True
    capabilities = replace(
        ScoreAttention.capabilities, query_dim=True, compiles=True, exports=True, double_backward=True
    )
    check_options = (
        {"local": "m", "half_width": 1},
        {"local": "p", "half_width": 3},
        {"score": "dot", "local": "m", "half_width": 2},
        {"score": "concat", "local": "p", "half_width": 2, "hidden_size": 3},
        {"score": "location", "max_length": 48, "local": "m", "half_width": 2},
        {"score": "location", "max_length": 48, "local": "p", "half_width": 3},
    )

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
        local: str | None = None,
        half_width: int = 10,
    ) -> None:
        for word, one, known in (("score", score, SCORES), ("local", local, LOCAL)):
            if one not in known:
                raise InvalidInput(f"multiplicative: {word} must be one of {', '.join(map(str, known))}, got {one!r}")
        sizes = {"hidden_size": hidden_size, "max_length": max_length, "half_width": half_width}
        for word, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise InvalidInput(f"multiplicative: {word} must be an int of 1 or more, got {size!r}")
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        hidden = head_dim if hidden_size is None else hidden_size
        self.score, self.local, self.half_width = score, local, half_width
        self.options = {**sizes, "score": score, "hidden_size": hidden, "local": local}
        self.reweights = self.hides = local == "p"
        self.shift_invariant = score != "location"
        self.reads_query_positions = local == "m"
        if local is not None:
            self.narrow(position_free=f"local-{local} reads positions")
        if local == "p":
            self.narrow(normalised="a Gaussian lowers weights, and they are not normalised again")
            self.W_p = nn.Parameter(torch.empty(num_heads, hidden, self.head_dim))
            self.v_p = nn.Parameter(torch.empty(num_heads, hidden))
        self.inner_product = score in ("dot", "general")
        if self.inner_product and not self.hides:
            self.narrow(double_backward="torch's fused kernels have no second derivatives")
        if score == "dot":
            self.narrow(query_dim="the dot score is q^T k, which needs one width; general and concat take two")
        elif score == "general":
            self.W_a = nn.Parameter(torch.empty(num_heads, self.head_dim, self.key_dim))
        elif score == "concat":
            self.W_a = nn.Parameter(torch.empty(num_heads, hidden, self.head_dim + self.key_dim))
            self.v_a = nn.Parameter(torch.empty(num_heads, hidden))
            self.projected_width = hidden
            self.state_type = ProjectedState  # type: ignore[misc] # of this instance
        else:
            why = "location scores source positions by W_a, whose rows one length fixes"
            self.narrow(
                cross_lengths=why,
                state=why,
                position_free=why,
                linear_memory="a score for each of max_length positions is made at once",
            )
            self.require(max_length=max_length)
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
        if self.local == "p":
            nn.init.normal_(self.W_p, std=self.W_p.shape[-1] ** -0.5)
            nn.init.normal_(self.v_p, std=self.v_p.shape[-1] ** -0.5)

    def default_scale(self) -> float:
        return 1.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if self.local == "m":
            call = call.within(query, key, left=self.half_width, right=self.half_width)
        elif self.local == "p":
            shown = call.visible_under_bias(query, key)
            centre = _centre(query, self.W_p, self.v_p, key.shape[2], shown)
            query = torch.cat([query.to(centre.dtype), centre], 3)  # which project_query and tiles read
        return super().attend(query, key, value, call)

    def project_query(self, query: Tensor) -> Tensor:
        if self.local != "p":
            return self._projected_query(query)
        return torch.cat([self._projected_query(query[..., :-1]), query[..., -1:]], 3)

    def _projected_query(self, query: Tensor) -> Tensor:
        if self.score == "general":
            return query @ self.W_a.to(query.dtype)  # [B, H, Lq, Dk]
        if self.score == "concat":
            return additive_projection(query, self.W_a[..., : self.head_dim])  # [B, H, Lq, A]
        if self.score == "location":
            wide = accumulation_dtype(query.dtype)  # these are the scores
            return query.to(wide) @ self.W_a.to(wide).transpose(-1, -2)  # [B, H, Lq, max_length]
        return query

    def project_key(self, key: Tensor) -> Tensor:
        if self.score == "concat":
            return additive_projection(key, self.W_a[..., self.head_dim :])  # [B, H, Lk, A]
        return key

    def kept_from(self) -> dict[str, Tensor]:
        return self.named_parts("W_a") if self.score == "concat" else {}

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        query = query[..., :-1] if self.local == "p" else query
        if self.score == "location":
            index = key_positions[None] if key_positions.dim() == 1 else key_positions  # [B | 1, tk]
            index = index.clamp(min=0)  # padding on the left stands before position 0, and is hidden
            index = index[:, None, None, :].expand(query.shape[0], query.shape[1], query.shape[2], -1)
            return query.gather(3, index)
        if self.score == "concat":
            return additive_scores(query, key, self.v_a)
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions)

    def visible(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self._distance(query, key_positions).abs() <= self.half_width

    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return torch.exp(-2 * (self._distance(query, key_positions) / self.half_width).square())

    def _distance(self, query: Tensor, key_positions: Tensor) -> Tensor:
        """Of each key from the predicted position, `[B, H, tq, tk]`."""
        at = key_positions if key_positions.dim() == 1 else key_positions[:, None, None]
        return at - query[..., -1:]

    def tile_cost_of(self, query: Tensor) -> float:
        return additive_tile_cost(query, self.v_a) if self.score == "concat" else self.tile_cost


@in_own_precision
def _centre(query: Tensor, w_p: Tensor, v_p: Tensor, key_length: int, visibility: Visibility | None) -> Tensor:
    """`p_t [B, H, Lq, 1]` in the accumulation dtype: eq. 9, counted from the first key that the query may see."""
    wide = accumulation_dtype(query.dtype)
    inside = torch.tanh(query.to(wide) @ w_p.to(wide).transpose(-1, -2))  # [B, H, Lq, A]
    share = torch.sigmoid(inside @ v_p.to(wide)[:, :, None])
    if visibility is None:
        return key_length * share
    first, last = visibility.span()
    return first[..., None] + (last - first + 1)[..., None] * share
