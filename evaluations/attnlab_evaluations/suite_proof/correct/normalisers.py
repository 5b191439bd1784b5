"""Weights that are no softmax: sparsemax, entmax, the k best, the one best, sigmoid. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Capabilities, InvalidInput, ScoreAttention
from attnlab.engines import in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import (
    dropped,
    each_head,
    hidden_scores,
    products,
    scale_of,
    softmax_rows,
    widened,
)

PAIRWISE = Capabilities(
    causal=True,
    window=True,
    key_mask=True,
    mask=True,
    segments=True,
    mask_mod=True,
    bias=True,
    scale=True,
    cross_lengths=True,
    gqa=True,
    value_dim=True,
    dropout=True,
    weights="in_graph",
    backward=True,
    dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
    devices=frozenset({"cpu", "cuda"}),
    exact=True,
    normalised=True,
    position_free=True,
    deterministic=True,
    linear_in_value=True,
)
"""What a dense variant with every pair in memory can be asked for."""


def _scores(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    return *products(query, key, visible=visible, bias=bias, scale=scale), value


def sparsemax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """The point of the simplex nearest to the scores; the support by Michelot's shrinking sets (1986)."""
    s, support, value = _scores(query, key, value, visible, bias, scale)
    for _ in range(s.shape[-1] + 1):
        count = support.sum(-1, keepdim=True).clamp_min(1)
        tau = (torch.where(support, s, 0).sum(-1, keepdim=True) - 1) / count
        kept = support & (s.detach() > tau.detach())
        if bool((kept == support).all()):
            break
        support = kept
    weights = torch.where(support, s - tau, 0)
    return {"out": weights @ value, "weights": weights}


class SparsemaxAttention(Attention):
    """Weights are the Euclidean projection of scores onto the simplex. Martins and Astudillo 2016, algorithm 1."""

    name = "sparsemax"
    formula = "sparsemax"
    definition = staticmethod(sparsemax)
    capabilities = PAIRWISE

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        scale = scale_of(self, call)
        w = self.weights(hidden_scores(q @ k.transpose(-1, -2) * scale, call))
        out = (dropped(w, call) @ v).to(query.dtype)
        return AttentionOutput(out, w.to(query.dtype) if call.need_weights else None)

    def weights(self, s: Tensor) -> Tensor:
        peak = s.detach().amax(-1, keepdim=True)
        s = s - torch.where(peak > -torch.inf, peak, 0)
        ordered = s.sort(-1, descending=True).values
        sums = ordered.cumsum(-1)
        ranks = torch.arange(1, s.shape[-1] + 1, device=s.device, dtype=s.dtype)
        size = (1 + ranks * ordered > sums).sum(-1, keepdim=True)  # 0 in a dead row
        tau = (sums.gather(-1, (size - 1).clamp_min(0)) - 1) / size.clamp_min(1)
        return torch.where((size > 0) & (s > tau), s - tau, 0)


def entmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """p_j = max(s_j / 2 - tau, 0)^2 with sum 1; the support by bisection, tau by its closed form on it."""
    s, visible, value = _scores(query, key, value, visible, bias, scale)
    z = torch.where(visible, s / 2, -torch.inf)
    top = z.detach().amax(-1, keepdim=True)
    z = torch.where(visible, s / 2 - top, -torch.inf)
    with torch.no_grad():
        low, high = torch.full_like(top, -1.0), torch.zeros_like(top)
        for _ in range(60):
            middle = (low + high) / 2
            enough = (z - middle).clamp_min(0).square().sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        support = visible & (z > low)
    count = support.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(support, z, 0).sum(-1, keepdim=True) / count
    spread = torch.where(support, z - mean, 0).square().sum(-1, keepdim=True)
    tau = mean - ((1 - spread) / count).clamp_min(torch.finfo(z.dtype).tiny).sqrt()
    weights = torch.where(support, z - tau, 0).square()
    return {"out": weights @ value, "weights": weights}


class EntmaxAttention(ScoreAttention):
    """1.5-entmax: sparse weights with a smooth border. Peters, Niculae and Martins 2019, algorithm 2."""

    name = "entmax15"
    formula = "entmax15"
    definition = staticmethod(entmax)
    capabilities = replace(
        ScoreAttention.capabilities,
        softcap=False,
        score_mod=False,
        sinks=False,
        lse=False,
        state=False,
        linear_memory=False,
    )

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        scale = scale_of(self, call)
        w = self.weights(hidden_scores(q @ k.transpose(-1, -2) * scale, call))
        out = (dropped(w, call) @ v).to(query.dtype)
        return AttentionOutput(out, w.to(query.dtype) if call.need_weights else None)

    def weights(self, s: Tensor) -> Tensor:
        alive = s > -torch.inf
        peak = s.detach().amax(-1, keepdim=True)
        # tau is no less than the maximum - 1, so whatever lies 2 below it has no weight.
        z = (s / 2 - torch.where(peak > -torch.inf, peak / 2, 0)).masked_fill(~alive, -2.0)
        with torch.no_grad():
            ordered = z.sort(-1, descending=True).values
            ranks = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
            mean = ordered.cumsum(-1) / ranks
            spread = ordered.square().cumsum(-1) - ranks * mean.square()
            tau = mean - ((1 - spread) / ranks).clamp_min(0).sqrt()
            size = (tau <= ordered).sum(-1, keepdim=True)
            support = alive & (z >= ordered.gather(-1, size - 1))
        count = support.sum(-1, keepdim=True).clamp_min(1)
        mean = torch.where(support, z, 0).sum(-1, keepdim=True) / count
        spread = torch.where(support, z - mean, 0).square().sum(-1, keepdim=True)
        tau = mean - ((1 - spread) / count).sqrt()
        return torch.where(support, (z - tau).clamp_min(0), 0).square()


def k_best(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: dict[str, Any],
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Softmax over the visible keys that fewer than k visible keys beat; ties stay in."""
    s, visible, value = _scores(query, key, value, visible, bias, scale)
    beaten_by = (visible[..., None, :] & (s[..., None, :] > s[..., :, None])).sum(-1)  # [B, H, Lq, Lk]
    weights, lse = softmax_rows(s, visible & (beaten_by < options["k"]))
    return {"out": weights @ value, "weights": weights, "lse": lse}


class TopKAttention(SparsemaxAttention):
    """Softmax over each query's k best keys. Gupta et al. 2021, "Memory-efficient Transformers via Top-k Attention"; k = 3.

    Keys that tie with the k-th are kept, so that no order of keys decides.
    """

    name = "top_k"
    family = "score"
    formula = "top_k"
    definition = staticmethod(k_best)

    def __init__(self, *, k: int = 3, **sizes: Any) -> None:
        super().__init__(**sizes)
        if k < 1:
            raise InvalidInput(f"{self.name}: k must be 1 or more, got {k}")
        self.options = {"k": k}

    def weights(self, s: Tensor) -> Tensor:
        least = s.topk(min(self.options["k"], s.shape[-1]), -1).values[..., -1:]
        s = s.masked_fill(s < least, -torch.inf)
        alive = s > -torch.inf
        return torch.softmax(s.masked_fill(~alive.any(-1, keepdim=True), 0), -1).masked_fill(~alive, 0)


def best(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    bias: Tensor | None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """The value of the visible key with the largest score, the first of those that tie."""
    s, visible, value = _scores(query, key, value, visible, bias, scale)
    at = torch.where(visible, s, -torch.inf).argmax(-1)
    weights = (nn.functional.one_hot(at, s.shape[-1]) * visible).to(value.dtype)
    return {"out": weights @ value, "weights": weights}


class HardAttention(SparsemaxAttention):
    """Each query copies the value of its best key; gradients reach values only. Xu et al. 2015, section 4.1, at its mode."""

    name = "hard"
    formula = "hard"
    definition = staticmethod(best)
    capabilities = replace(PAIRWISE, weights="effective")  # no gradient flows through a choice

    def weights(self, s: Tensor) -> Tensor:
        first = torch.zeros_like(s).scatter_(-1, s.detach().argmax(-1, keepdim=True), 1.0)
        return first.masked_fill(s == -torch.inf, 0)


def sigmoid_sum(
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
    """sum_j sigmoid(s_ij + b_h) v_j over the visible keys."""
    s, visible, value = _scores(query, key, value, visible, bias, scale)
    weights = torch.where(visible, 1 / (1 + torch.exp(-s - parameters["b"][:, None, None])), 0)
    return {"out": weights @ value, "weights": weights}


class SigmoidAttention(Attention):
    """`sum_j sigmoid(s_ij + b_h) v_j`: every key on its own, nothing normalised. Ramapuram et al. 2024, eq. 3; b is learned.

    Products are taken pair by pair, so that NaN in a hidden pair reaches nothing. Parameter: `b [H]`, which starts at 0.
    """

    name = "sigmoid"
    formula = "sigmoid"
    definition = staticmethod(sigmoid_sum)
    capabilities = replace(
        PAIRWISE, normalised=False, double_backward=True, compiles=True, exports=True, isolates_nonfinite=True
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.b = nn.Parameter(torch.zeros(self.num_heads))

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = (x[..., None, :] if x is not None else x for x in widened(query, key, value))
        k, v = k.transpose(2, 3), v.transpose(2, 3)  # [B, H, 1, Lk, D] beside q [B, H, Lq, 1, D]
        visibility = None if call.visibility is None else call.visibility.dense()[..., None]
        if visibility is not None:
            q, k, v = (torch.where(visibility, x, 0) for x in (q, k, v))  # [B, H, Lq, Lk, D]
        scale = scale_of(self, call)
        s = hidden_scores((q * k).sum(-1) * scale, call)
        w = torch.sigmoid(s + self.b.to(s.dtype)[:, None, None])
        out = (dropped(w, call)[..., None] * v).sum(-2)
        return AttentionOutput(out.to(query.dtype), w.to(query.dtype) if call.need_weights else None)
