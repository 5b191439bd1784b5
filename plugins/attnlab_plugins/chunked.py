"""Softmax attention by chunks, in memory linear in length: Rabe and Staats 2021. Needs torch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnlab import ScoreAttention


class ChunkedAttention(ScoreAttention):
    """`out_i = sum_j softmax_j(q_i . k_j / sqrt(Dk)) v_j`, Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory".

    The dot product on the tiled engine alone: plain torch on any device, for every request; forward one pass of online softmax,
    backward by recomputed chunks. NaN and Inf stay with the rows that see them. `dot_product` is faster where torch's fused
    function serves the request. Parameter-free.
    """

    name = "chunked"
    formula = "softmax_dot_product"
    capabilities = replace(
        ScoreAttention.capabilities,
        isolates_nonfinite=True,
        notes={"compiles": "it looks for NaN and Inf, on which what runs depends"},
    )

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = query.double() if query.element_size() == 8 else query.float()
        return wide @ key.to(wide.dtype).transpose(-1, -2)
