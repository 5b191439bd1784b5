"""Scaled dot-product attention: `softmax(q k^T / sqrt(Dk)) v` [Vaswani et al. 2017, eq. 1]. Needs torch."""

from __future__ import annotations

from dataclasses import replace

from attnlab import ScoreAttention
from attnlab.engines import FusedSoftmax


class DotProductAttention(ScoreAttention):
    """`out_i = sum_j softmax_j(q_i . k_j / sqrt(Dk)) v_j`, Vaswani et al. 2017, "Attention Is All You Need", eq. 1.

    torch's fused function serves what it can (causal, masks, bias, grouped-query heads); softcap, score_mod, sinks, weights, lse
    and dropout take the tiled engine, as do masks too large to build. Parameter-free.
    """

    name = "dot_product"
    formula = "softmax_dot_product"
    capabilities = replace(ScoreAttention.capabilities, compiles=True, exports=True)
    inner_product = True
    fast_path = FusedSoftmax()
