"""What heads may be: mixed with each other, one for all queries, one in all, of one width. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Reason, ScoreAttention, UnsupportedRequest
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


def talking_heads(
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
    """Logits mixed over heads by P_l, softmax, weights mixed over heads by P_w; a hidden pair gives 0 to both and takes nothing."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    s, visible = products(query, key, visible=visible, bias=bias, scale=scale)
    w, _ = softmax_rows(torch.einsum("hg,bgij->bhij", parameters["P_l"], s), visible)
    weights = torch.where(visible, torch.einsum("hg,bgij->bhij", parameters["P_w"], w), 0)
    return {"out": weights @ value, "weights": weights}


class TalkingHeadsAttention(Attention):
    """Heads exchange logits before softmax and weights after it. Shazeer et al. 2020, "Talking-Heads Attention", section 4.

    Parameters: `P_l [H, H]` and `P_w [H, H]`, the identity plus noise. Heads may see other keys: a pair that is hidden in one head
    gives nothing to the others and receives nothing from them.
    """

    name = "talking_heads"
    formula = "talking_heads"
    definition = staticmethod(talking_heads)
    capabilities = replace(PAIRWISE, normalised=False, heads_independent=False)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        h = self.num_heads
        self.P_l, self.P_w = (nn.Parameter(torch.eye(h) + 0.3 * torch.randn(h, h)) for _ in range(2))

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale_of(self, call), call)
        visible = s > -torch.inf
        s = self.mixed_scores(s, visible, self.P_l.to(q.dtype))
        sees = visible.any(-1, keepdim=True)
        w = torch.softmax(s.masked_fill(~visible, -torch.inf).masked_fill(~sees, 0), -1).masked_fill(~sees, 0)
        w = self.mixed_weights(w, visible, self.P_w.to(q.dtype))
        out = (dropped(w, call) @ v).to(query.dtype)
        return AttentionOutput(out, w.to(query.dtype) if call.need_weights else None)

    def mixed_scores(self, s: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("hg,bgij->bhij", p, s.masked_fill(~visible, 0))

    def mixed_weights(self, w: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("hg,bgij->bhij", p, w).masked_fill(~visible, 0)


class MultiQueryAttention(ScoreAttention):
    """Softmax attention with one key/value head for all query heads, and no other number. Shazeer 2019, "Fast Transformer Decoding"."""

    name = "multi_query"
    formula = "softmax_dot_product"

    def __init__(self, *, num_kv_heads: int | None = None, **sizes: Any) -> None:
        super().__init__(num_kv_heads=1 if num_kv_heads is None else num_kv_heads, **sizes)
        if self.num_kv_heads != 1:
            reason = Reason("gqa", f"{num_kv_heads} key/value heads", "1")
            raise UnsupportedRequest(f"{self.name} does not support {reason}", [reason])

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return query.to(wide) @ key.to(wide).transpose(-1, -2)


class SingleHeadAttention(ScoreAttention):
    """Softmax attention of one head, as in Luong et al. 2015, before there were several."""

    name = "single_head"
    formula = "softmax_dot_product"
    capabilities = replace(ScoreAttention.capabilities, gqa=False)
    inner_product = True

    def __init__(self, *, num_heads: int = 1, **sizes: Any) -> None:
        super().__init__(num_heads=num_heads, **sizes)
        if num_heads != 1:
            reason = Reason("num_heads", f"{num_heads} heads", "1")
            raise UnsupportedRequest(f"{self.name} does not support {reason}", [reason])


class Wide16Attention(ScoreAttention):
    """Softmax attention of heads of 16, the width that a kernel was written for."""

    name = "wide16"
    formula = "softmax_dot_product"
    capabilities = replace(ScoreAttention.capabilities, value_dim=False, head_dims=range(16, 17))
    inner_product = True
