"""Other ways from scores to weights: a polynomial, a difference of two softmaxes, a softmax for each channel. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call
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
from attnlab_evaluations.suite_proof.correct.normalisers import PAIRWISE


def polynomial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: dict[str, Any],
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """s_ij^p v_j / (1 + sum_j s_ij^p), s = q_i^T k_j * scale, p even."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query, key, visible=visible, bias=None, scale=scale)
    powers = torch.where(visible, s, 0) ** options["degree"]
    weights = powers / (1 + powers.sum(-1, keepdim=True))
    return {"out": weights @ value, "weights": weights}


class PolynomialAttention(Attention):
    """`sum_j s_ij^p v_j / (1 + sum_j s_ij^p)` with an even p, 4. Kacham et al. 2023, "PolySketchFormer", section 2.

    The 1 is a null slot. Where a key is very large its power overflows float32, as the formula has it.
    """

    name = "polynomial"
    formula = "polynomial"
    definition = staticmethod(polynomial)
    capabilities = replace(PAIRWISE, bias=False, normalised=False, null_key=True)

    def __init__(self, *, degree: int = 4, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"degree": degree}

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        s = q @ k.transpose(-1, -2) * scale_of(self, call)
        if call.visibility is not None:
            s = s.masked_fill(~call.visibility.dense(), 0)
        powers = s ** self.options["degree"]
        w = powers / (1 + powers.sum(-1, keepdim=True))
        out = (dropped(w, call) @ v).to(query.dtype)
        return AttentionOutput(out, w.to(query.dtype) if call.need_weights else None)


def difference(
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
    """(softmax(q1_i^T k1_j * scale) - tanh(l_h) softmax(q2_i^T k2_j * scale)) v; default scale (Dk / 2)^-0.5."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    half = key.shape[-1] // 2
    scale = half**-0.5 if scale is None else scale
    weights = []
    for part in (slice(0, half), slice(half, 2 * half)):
        s, observed = products(query[..., part], key[..., part], visible=visible, bias=bias, scale=scale)
        weights.append(softmax_rows(s, observed)[0])
    joined = weights[0] - torch.tanh(parameters["l"])[:, None, None] * weights[1]
    return {"out": joined @ value, "weights": joined}


class DifferentialAttention(Attention):
    """The difference of two softmaxes, each over half of a head. Ye et al. 2024, "Differential Transformer", eq. 1.

    Weights may be negative and sum to `1 - tanh(l_h)`. Parameter: `l [H]`. Heads are of even width.
    """

    name = "differential"
    formula = "differential"
    definition = staticmethod(difference)
    capabilities = replace(PAIRWISE, normalised=False, value_dim=False, head_dims=range(2, 513, 2))

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.l = nn.Parameter(torch.rand(self.num_heads))

    def default_scale(self) -> float:
        return float((self.key_dim // 2) ** -0.5)

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        halves = []
        for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True):
            s = hidden_scores(a @ b.transpose(-1, -2) * scale_of(self, call), call)
            sees = (s > -torch.inf).any(-1, keepdim=True)
            halves.append(torch.softmax(s.masked_fill(~sees, 0), -1).masked_fill(~sees, 0))
        w = halves[0] - torch.tanh(self.l.to(q.dtype))[:, None, None] * halves[1]
        out = (dropped(w, call) @ v).to(query.dtype)
        return AttentionOutput(out, w.to(query.dtype) if call.need_weights else None)


def channels(
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
    """sigmoid(q_id) sum_j softmax_j(k_jd) v_jd for each channel d, over the visible keys."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    inside = key[:, :, None].expand(*visible.shape, -1).transpose(-1, -2)  # [B, H, Lq, D, Lk]
    weights, _ = softmax_rows(inside, visible[..., None, :])
    return {"out": torch.sigmoid(query) * torch.einsum("bhidj,bhjd->bhid", weights, value)}


class ChannelwiseAttention(Attention):
    """Each channel has weights of its own, from keys alone; queries gate what comes out.

    Zhai et al. 2021, "An Attention Free Transformer", eq. 2 without position biases (AFT-simple). One width for query, key and
    value; no matrix of weights exists. Sums run over all pairs here, so that any mask is served.
    """

    name = "channelwise"
    formula = "channelwise"
    definition = staticmethod(channels)
    capabilities = replace(
        PAIRWISE, bias=False, scale=False, dropout=False, weights=None, normalised=False, value_dim=False
    )

    def default_scale(self) -> None:
        return None

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        each = k.transpose(-1, -2)[:, :, None].expand(-1, -1, q.shape[2], -1, -1)  # [B, H, Lq, D, Lk]
        if call.visibility is None:
            w = torch.softmax(each, -1)
        else:
            hidden = ~call.visibility.dense()[..., None, :]
            dead = hidden.all(-1, keepdim=True)
            w = torch.softmax(each.masked_fill(hidden, -torch.inf).masked_fill(dead, 0), -1).masked_fill(hidden, 0)
        out = torch.sigmoid(q) * (w * v.transpose(-1, -2)[:, :, None]).sum(-1)
        return AttentionOutput(out.to(query.dtype))
