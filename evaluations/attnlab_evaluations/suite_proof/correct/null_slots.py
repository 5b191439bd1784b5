"""A slot that is not a key joins the normaliser: softmax1, and a learned null key with a value of its own. Needs torch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Capabilities, ScoreAttention
from attnlab.engines import accumulation_dtype, in_own_precision
from attnlab.formulas import per_query_head, softmax_attention, without_absent
from attnlab_evaluations.suite_proof.correct._shared import (
    dropped,
    each_head,
    hidden_scores,
    products,
    scale_of,
    widened,
)


def softmax_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    sinks: Tensor | None = None,
    gates: None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """sum_j exp(s_j) v_j / (1 + exp(sink_h) + sum_j exp(s_j)), s = q_i^T k_j * scale."""
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    extra = torch.zeros(heads, dtype=query.dtype, device=query.device)
    if sinks is not None:
        extra = torch.logaddexp(extra, sinks.to(query.dtype))
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2)
    return softmax_attention(scores, value, visible=visible, scale=scale, sinks=extra, **rest)


class SoftmaxOneAttention(ScoreAttention):
    """`sum_j exp(s_j) v_j / (1 + sum_j exp(s_j))`: a head may look at nothing. Miller 2023, "Attention Is Off By One".

    The 1 is a slot with logit 0 and no value, so a row's weights sum to less than 1. Sinks of a call join beside it.
    """

    name = "softmax_one"
    formula = "softmax_one"
    definition = staticmethod(softmax_one)
    capabilities = replace(ScoreAttention.capabilities, normalised=False, null_key=True)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        return query.to(wide) @ key.to(wide).transpose(-1, -2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        with_slot = copy.copy(call)
        wide = accumulation_dtype(query.dtype)
        with_slot.sinks = (
            torch.zeros(self.num_heads, dtype=wide, device=query.device)
            if call.sinks is None
            else nn.functional.softplus(call.sinks.to(wide))  # log(exp(0) + exp(sink))
        )
        return super().attend(query, key, value, with_slot)


def null_slot(
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
    """softmax over (k_0, keys) times (v_0, values); rows that see no key are 0, null slot or not."""
    heads = query.shape[1]
    key, value = each_head(key, heads), each_head(value, heads)
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query, key, visible=visible, bias=bias, scale=factor)
    s0 = torch.einsum("bhid,hd->bhi", query, parameters["null_key"])[..., None] * factor
    sees = visible.any(-1, keepdim=True)
    top = torch.maximum(s0, torch.where(visible, s, -torch.inf).amax(-1, keepdim=True)).detach()
    e, e0 = torch.where(visible, torch.exp(s - top), 0), torch.exp(s0 - top)
    total = e.sum(-1, keepdim=True) + e0
    weights = torch.where(sees, e / total, 0)
    from_null = torch.where(sees, e0 / total, 0) * parameters["null_value"][:, None]
    lse = torch.where(sees, top + total.log(), -torch.inf)[..., 0]
    return {"out": weights @ value + from_null, "weights": weights, "lse": lse}


class NullSlotAttention(Attention):
    """A learned key and value per head that every query sees beside its own keys.

    Source: the "no attention" state of Vig and Belinkov 2019 made learnable, as `add_bias_kv` of torch's MultiheadAttention (Ott et
    al. 2019, "fairseq"). `out = (sum_j e^{s_j} v_j + e^{s_0} v_0) / (sum_j e^{s_j} + e^{s_0})`; the weights returned are those
    of real keys. Parameters: `null_key [H, Dk]`, `null_value [H, Dv]`. Affine in value, not linear; a query that sees no key
    gives 0, as everywhere.
    """

    name = "null_slot"
    formula = "null_slot"
    definition = staticmethod(null_slot)
    capabilities = Capabilities(
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
        lse=True,
        backward=True,
        dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
        exact=True,
        normalised=True,  # the null slot's weight counted
        null_key=True,
        position_free=True,
        deterministic=True,
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.null_key = nn.Parameter(torch.randn(self.num_heads, self.key_dim))
        self.null_value = nn.Parameter(torch.randn(self.num_heads, self.value_dim))

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        scale = scale_of(self, call)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale, call)
        s0 = q @ self.null_key.to(q.dtype)[:, :, None] * scale  # [B, H, Lq, 1]
        sees = (s > -torch.inf).any(-1, keepdim=True)
        everything = torch.cat([s, s0], -1)
        w = torch.where(sees, torch.softmax(everything, -1), torch.zeros_like(everything))
        used = dropped(w, call)
        null_value = self.null_value.to(v.dtype)[None, :, None].expand(v.shape[0], -1, -1, -1)
        out = used @ torch.cat([v, null_value], 2)
        lse = torch.logsumexp(everything, -1).masked_fill(~sees[..., 0], -torch.inf) if call.need_lse else None
        weights = w[..., :-1].to(query.dtype) if call.need_weights else None
        return AttentionOutput(out.to(query.dtype), weights, lse)
