"""Weights that no content decides, values that are changed on their way, constants of a key/value head. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, ScoreAttention
from attnlab.engines import accumulation_dtype, in_own_precision
from attnlab.formulas import per_query_head, softmax_attention
from attnlab_evaluations.suite_proof.correct._shared import (
    dropped,
    each_head,
    hidden_scores,
    products,
    scale_of,
    softmax_rows,
    widened,
)
from attnlab_evaluations.suite_proof.correct.normalisers import PAIRWISE

# -- weights of places --------------------------------------------------------------------------------------------


def random_synthesizer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: dict[str, Any],
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(R[h, i mod n, j mod n]) v."""
    value = torch.where(visible.any(-2).unsqueeze(-1), per_query_head(value, query.shape[1]), 0)
    places = [p % options["places"] for p in positions]
    scores = torch.stack([parameters["R"][:, i][:, :, j] for i, j in zip(*places, strict=True)])
    scale = 1.0 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


class RandomSynthesizerAttention(ScoreAttention):
    """A learned matrix of scores in the place of queries and keys: `softmax_j(R[h, i, j])`.

    Source: Tay et al. 2021, "Synthesizer: Rethinking Self-Attention", section 3.2. Parameter: `R [H, n, n]`; places count modulo n.
    Weights depend on the parameter and on positions alone; default scale 1.
    """

    name = "random_synthesizer"
    formula = "random_synthesizer"
    definition = staticmethod(random_synthesizer)
    capabilities = replace(ScoreAttention.capabilities, position_free=False, query_dim=True)

    def __init__(self, *, places: int = 12, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"places": places}
        self.R = nn.Parameter(torch.randn(self.num_heads, places, places))

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        table = self.R.to(accumulation_dtype(query.dtype))
        i, j = (p % self.options["places"] for p in (query_positions, key_positions))
        result = table[:, i[..., :, None], j[..., None, :]]  # [H, tq, tk], or [H, B, tq, tk]
        result = result.transpose(0, 1) if result.dim() == 4 else result[None]
        return result.expand(query.shape[0], -1, -1, -1)


def fixed_gaussian(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(-(i - j)^2 / 2) v, i and j positions."""
    value = torch.where(visible.any(-2).unsqueeze(-1), per_query_head(value, query.shape[1]), 0)
    apart = (positions[0][:, :, None] - positions[1][:, None, :])[:, None].to(value.dtype)
    scores = (-0.5 * apart**2).expand(visible.shape)
    scale = 1.0 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


class FixedGaussianAttention(ScoreAttention):
    """A Gaussian around each position, nothing learned: `softmax_j(-(i - j)^2 / 2)`.

    Source: You et al. 2020, "Hard-Coded Gaussian Attention for Neural Machine Translation". Weights are constants: no gradient
    goes through them. Default scale 1.
    """

    name = "fixed_gaussian"
    formula = "fixed_gaussian"
    definition = staticmethod(fixed_gaussian)
    shift_invariant = True
    capabilities = replace(ScoreAttention.capabilities, position_free=False, query_dim=True)

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        apart = query_positions[..., :, None] - key_positions[..., None, :]
        apart = apart[:, None] if apart.dim() == 3 else apart
        scores = -0.5 * apart.to(accumulation_dtype(query.dtype)).square()
        return scores.expand(query.shape[0], query.shape[1], *scores.shape[-2:])


# -- values that are changed --------------------------------------------------------------------------------------


def changed_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Softmax over the keys; `b_v` is added to every value, or `W_o` multiplies the mean, or scores have a rate by key/value head."""
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = each_head(key, heads), each_head(value, heads)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    if not parameters:
        rates = torch.tensor([1 + 0.5 * (h // (heads // kv_heads)) for h in range(heads)], dtype=query.dtype)
        query = query * rates[:, None, None]
    s, visible = products(query, key, visible=visible, bias=bias, scale=scale)
    weights, lse = softmax_rows(s, visible)
    if "b_v" in parameters:
        value = value + parameters["b_v"][:, None]
    out = weights @ value
    if "W_o" in parameters:
        out = out @ parameters["W_o"]
    return {"out": out, "weights": weights, "lse": lse}


class _ChangedValues(Attention):
    """Softmax attention with every pair in memory; subclasses change queries, values or the mean. `lse` is float64 throughout."""

    definition = staticmethod(changed_values)
    capabilities = replace(PAIRWISE, lse=True)

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        s = hidden_scores(self.asked(q) @ k.transpose(-1, -2) * scale_of(self, call), call)
        sees = (s > -torch.inf).any(-1, keepdim=True)
        s = s.masked_fill(~sees, 0)
        w = torch.softmax(s, -1).masked_fill(~sees, 0)
        lse = torch.logsumexp(s, -1).masked_fill(~sees[..., 0], -torch.inf) if call.need_lse else None
        out = self.projected(dropped(w, call) @ self.embedded(v)).to(query.dtype)
        shown = w.to(query.dtype) if call.need_weights else None
        return AttentionOutput(out, shown, None if lse is None else lse.double())

    def asked(self, q: Tensor) -> Tensor:
        return q

    def embedded(self, v: Tensor) -> Tensor:
        return v

    def projected(self, mean: Tensor) -> Tensor:
        return mean


class ProjectedValuesAttention(_ChangedValues):
    """Softmax attention whose heads project their mean: `softmax(q k^T) v W_o[h]`. Its weights sum to 1; out is no mean of values.

    The output projection of Vaswani et al. 2017, section 3.2.2, kept in the head. Parameter: `W_o [H, Dv, Dv]`.
    """

    name = "projected_values"
    formula = "projected_values"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.W_o = nn.Parameter(torch.randn(self.num_heads, self.value_dim, self.value_dim) * self.value_dim**-0.5)

    def projected(self, mean: Tensor) -> Tensor:
        return mean @ self.W_o.to(mean.dtype)


class ValueEmbeddingAttention(_ChangedValues):
    """Softmax attention that adds a learned vector to every value it reads: `softmax(q k^T) (v + b_v[h])`.

    Source: the embedding of values of Shaw et al. 2018, eq. 3, of one distance. Parameter: `b_v [H, Dv]`.
    """

    name = "value_embedding"
    formula = "value_embedding"
    capabilities = replace(_ChangedValues.capabilities, linear_in_value=False)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.b_v = nn.Parameter(torch.randn(self.num_heads, self.value_dim))

    def embedded(self, v: Tensor) -> Tensor:
        return v + self.b_v.to(v.dtype)[:, None]


class RateByGroupAttention(_ChangedValues):
    """Softmax attention whose groups have temperatures of their own, `1 + c / 2` for key/value head c.

    As the fixed rates of Sun et al. 2023, "Retentive Network", by head: constants that depend on how many key/value heads there are.
    """

    name = "rate_by_group"
    formula = "rate_by_group"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rates = [1 + 0.5 * c for c in range(self.num_kv_heads)]

    def asked(self, q: Tensor) -> Tensor:
        rates = torch.tensor(self.rates, dtype=q.dtype, device=q.device)
        return q * rates.repeat_interleave(self.num_heads // self.num_kv_heads)[:, None, None]
