"""Code from elsewhere behind the interface: numpy, a backward written by hand, a gate on the weights. Needs torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Capabilities, Reason, Request, ScoreAttention
from attnlab.engines import accumulation_dtype, expand_heads, in_own_precision
from attnlab.formulas import per_query_head, softmax_attention, without_absent
from attnlab_evaluations.suite_proof.correct._shared import scale_of


class ListsAttention(Attention):
    """Softmax attention over Python numbers, one query at a time: a reference for up to 100 keys. Vaswani et al. 2017, eq. 1.

    It leaves torch altogether, so nothing can be recorded, compiled or mapped.
    """

    name = "lists"
    formula = "softmax_dot_product"
    capabilities = Capabilities(
        causal=True,
        key_mask=True,
        cross_lengths=True,
        gqa=True,
        dtypes=frozenset({"float64", "float32"}),
        devices=frozenset({"cpu"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
        batch_invariant=True,
    )

    def supports(self, request: Request) -> list[Reason]:
        reasons = super().supports(request)
        if request.key_length > 100:
            reasons.append(Reason("key_length", f"{request.key_length} keys", "up to 100", "it is slow"))
        return reasons

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        shape = (*query.shape[:3], key.shape[2])
        visible = torch.ones(shape, dtype=torch.bool, device=query.device)
        if call.visibility is not None:
            visible = call.visibility.dense().expand(shape)
        group = query.shape[1] // key.shape[1]
        k, v, rows = key.tolist(), value.tolist(), visible.tolist()
        out = [
            [
                [_one_row(q, k[b][h // group], v[b][h // group], rows[b][h][i]) for i, q in enumerate(head)]
                for h, head in enumerate(item)
            ]
            for b, item in enumerate(query.tolist())
        ]
        return AttentionOutput(torch.tensor(out, dtype=query.dtype, device=query.device))


def _one_row(q: list[float], keys: list[list[float]], values: list[list[float]], earlier: list[bool]) -> list[float]:
    chosen = [j for j, visible in enumerate(earlier) if visible]
    if not chosen:
        return [0.0] * len(values[0])
    s = [len(q) ** -0.5 * sum(a * b for a, b in zip(q, keys[j], strict=True)) for j in chosen]
    w = [math.exp(one - max(s)) for one in s]
    return [sum(w[n] * values[j][d] for n, j in enumerate(chosen)) / sum(w) for d in range(len(values[0]))]


class _Softmax(torch.autograd.Function):
    """out = softmax(s) v with a backward that recomputes the weights from lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
        s = q @ k.transpose(-1, -2) * scale
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(s, -1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(s - lse) is 0 in a dead row
        out = torch.exp(s - lse) @ v
        ctx.save_for_backward(q, k, v, out, lse, hidden)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, hidden = ctx.saved_tensors
        s = q @ k.transpose(-1, -2) * ctx.scale
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        p = torch.exp(s - lse)
        ds = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad, None, None


class HandwrittenAttention(Attention):
    """Softmax attention with a backward of its own, once differentiable. Dao et al. 2022, "FlashAttention", section 3.1."""

    name = "handwritten"
    formula = "softmax_dot_product"
    capabilities = Capabilities(
        causal=True,
        window=True,
        key_mask=True,
        mask=True,
        scale=True,
        cross_lengths=True,
        gqa=True,
        value_dim=True,
        backward=True,
        dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
    )

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        wide = accumulation_dtype(query.dtype)
        k, v = (expand_heads(x, self.num_heads).to(wide) for x in (key, value))
        hidden = None if call.visibility is None else ~call.visibility.dense()
        scale = scale_of(self, call)
        attended: Any = _Softmax.apply  # torch gives it no type
        out: Tensor = attended(query.to(wide), k, v, hidden, float(scale))
        return AttentionOutput(out.to(query.dtype))


def gated_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: float | None,
    gates: None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """sigmoid(g_h^T q_i) softmax(q_i^T k_j * scale) v."""
    key, value = per_query_head(key, query.shape[1]), per_query_head(value, query.shape[1])
    query, key, value = without_absent(query, key, value, visible)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    result = softmax_attention(query @ key.transpose(-1, -2), value, visible=visible, scale=scale, **rest)
    gate = torch.sigmoid(torch.einsum("hd,bhid->bhi", parameters["g"], query))[..., None]
    return {"out": gate * result["out"], "weights": gate * result["weights"], "lse": result["lse"]}


class GatedWeightsAttention(ScoreAttention):
    """`sigmoid(g_h^T q_i) sum_j softmax_j(s_ij) v_j`: a query may turn its head off. Qiu et al. 2025, "Gated Attention".

    The gate multiplies the normalised weights, whose rows then sum to it. Parameter: `g [H, Dq]`.
    """

    name = "gated_weights"
    formula = "gated_weights"
    definition = staticmethod(gated_weights)
    capabilities = replace(ScoreAttention.capabilities, normalised=False)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.g = nn.Parameter(torch.randn(self.num_heads, self.head_dim) * self.head_dim**-0.5)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        return query.to(wide) @ key.to(wide).transpose(-1, -2)

    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        return torch.sigmoid(query.to(wide) @ self.g.to(wide)[..., None])  # [B, H, tq, 1]
