"""Variants with few capabilities: one dtype, half precision, a window and nothing else, no gradients, a plain call. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Capabilities, ScoreAttention
from attnlab.engines import in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import (
    each_head,
    hidden_scores,
    products,
    scale_of,
    softmax_rows,
    widened,
)


class Float64Attention(ScoreAttention):
    """Softmax attention in float64 and in nothing else: a yardstick."""

    name = "float64_only"
    formula = "softmax_dot_product"
    capabilities = replace(ScoreAttention.capabilities, dtypes=frozenset({"float64"}))
    inner_product = True


class HalfAttention(Attention):
    """Softmax attention of 16-bit inputs with float32 sums, as tensor cores have it: no other dtype."""

    name = "half_only"
    formula = "softmax_dot_product"
    capabilities = Capabilities(
        causal=True,
        key_mask=True,
        mask=True,
        scale=True,
        cross_lengths=True,
        gqa=True,
        weights="recomputed",
        lse=True,
        backward=True,
        dtypes=frozenset({"bfloat16", "float16"}),
        devices=frozenset({"cpu", "cuda"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
    )

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        scale = scale_of(self, call)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale, call)
        sees = (s > -torch.inf).any(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(~sees, 0), -1).masked_fill(~sees, 0)
        weights = lse = None
        if call.need_weights:
            weights = p.detach().to(query.dtype)
        if call.need_lse:
            lse = torch.logsumexp(s.masked_fill(~sees, 0), -1).masked_fill(~sees[..., 0], -torch.inf)
        return AttentionOutput((p @ v).to(query.dtype), weights, lse)


class WindowAttention(Attention):
    """Softmax attention over a band and nothing else: it is never causal by that word. Beltagy et al. 2020, "Longformer"."""

    name = "window_only"
    formula = "softmax_dot_product"
    capabilities = Capabilities(
        window=True,
        cross_lengths=True,
        backward=True,
        dtypes=frozenset({"float32"}),
        devices=frozenset({"cpu"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visibility = None if call.visibility is None else call.visibility.dense()
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visibility)
        # As kernels that keep tokens before heads return it: [B, L, H, D] in memory.
        return AttentionOutput(out.transpose(1, 2).contiguous().transpose(1, 2))


def mean_of_neighbours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(cos(pi (q_i^T k_j) / (|q_i|^2 + |k_j|^2))) v: a made-up score."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    s, visible = products(query, key, visible=visible, bias=None, scale=1.0)
    sizes = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :]
    weights, _ = softmax_rows(torch.cos(torch.pi * s / sizes), visible)
    return {"out": weights @ value}


class PlainCallAttention(Attention):
    """A formula of the author's own that can be called, in float32 on the CPU, and asked for nothing.

    `softmax_j(cos(pi q_i^T k_j / (|q_i|^2 + |k_j|^2)))`. No property is claimed.
    """

    name = "plain_call"
    formula = "plain_call"
    definition = staticmethod(mean_of_neighbours)
    capabilities = Capabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        sizes = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :]
        w = torch.softmax(torch.cos(torch.pi * (query @ key.transpose(-1, -2)) / sizes), -1)
        if call.visibility is not None and call.visibility.query_present is not None:
            w = w.masked_fill(~call.visibility.query_present[:, None, :, None], 0)
        return AttentionOutput(w @ value)


def gained(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(g_h q_i^T k_j * scale) v."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query * parameters["gain"][:, None, None], key, visible=visible, bias=None, scale=scale)
    weights, lse = softmax_rows(s, visible)
    return {"out": weights @ value, "weights": weights, "lse": lse}


class ForwardOnlyAttention(Attention):
    """Softmax attention for serving: one pass over keys that writes into its own sums, so there is no backward.

    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Parameter: `gain [H]`, trained elsewhere.
    """

    name = "forward_only"
    formula = "gained_dot_product"
    definition = staticmethod(gained)
    capabilities = Capabilities(
        causal=True,
        key_mask=True,
        mask=True,
        scale=True,
        cross_lengths=True,
        gqa=True,
        value_dim=True,
        lse=True,
        dtypes=frozenset({"float64", "float32", "bfloat16"}),
        devices=frozenset({"cpu"}),
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.gain = nn.Parameter(torch.ones(self.num_heads))

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        q = q * self.gain.to(q.dtype)[:, None, None] * scale_of(self, call)
        top = q.new_full((*q.shape[:3], 1), -torch.inf)
        total, out = torch.zeros_like(top), q.new_zeros(*q.shape[:3], v.shape[3])
        visibility = None if call.visibility is None else call.visibility.dense()
        for start in range(0, k.shape[2], 4):
            part = slice(start, start + 4)
            s = q @ k[:, :, part].transpose(-1, -2)
            if visibility is not None:
                s.masked_fill_(~visibility[..., part], -torch.inf)
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0)
            p, fade = (s - base).exp_(), (top - base).exp_()
            total.mul_(fade).add_(p.sum(-1, keepdim=True))
            out.mul_(fade).add_(p @ v[:, :, part])
            top = higher
        out.div_(total.masked_fill(total == 0, 1))
        lse = (top + total.log())[..., 0] if call.need_lse else None
        return AttentionOutput(out.to(query.dtype), None, lse)
