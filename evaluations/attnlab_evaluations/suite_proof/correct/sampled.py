"""Random by design: one key sampled for each query. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab import Attention, AttentionOutput, Call
from attnlab.engines import in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import hidden_scores, scale_of, widened
from attnlab_evaluations.suite_proof.correct.normalisers import PAIRWISE


class SampledAttention(Attention):
    """Each query copies the value of one key, drawn with softmax's probabilities. Xu et al. 2015, section 4.1.

    Its mean over draws is softmax attention, which is the definition that it is held to: neither `exact` nor `deterministic` is
    claimed. The draw is by Gumbel's trick with torch's default generator, so `torch.manual_seed` repeats it. Gradients reach
    values only.
    """

    name = "sampled"
    formula = "softmax_dot_product"
    capabilities = replace(PAIRWISE, dropout=False, weights=None, exact=False, deterministic=False)

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        scale = scale_of(self, call)
        s = hidden_scores(q @ k.transpose(-1, -2) * scale, call).detach()
        drawn = (s - torch.empty_like(s).exponential_().log()).argmax(-1, keepdim=True)  # [B, H, Lq, 1]
        one = torch.zeros_like(s).scatter_(-1, drawn, 1.0).masked_fill(s == -torch.inf, 0)
        return AttentionOutput((one @ v).to(query.dtype))
