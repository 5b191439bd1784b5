"""Mutants of `checks/through_weights.py`: wrong gradients through weights and lse. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _Returned


class LseGradientIsIgnored(_Backward):
    def delta(self, d_out: Tensor, d_lse: Tensor, out: Tensor) -> Tensor:
        return super().delta(d_out, torch.zeros_like(d_lse), out)


class RepairsTheWeightsThatItShows(TextbookAttention):
    """Of rows that a bias hides, the weights that are returned are repaired after the softmax: NaN backward."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        hidden = s.masked_fill(~visible, -torch.inf)
        self.repaired = weights if sinks is not None else torch.softmax(hidden, -1).nan_to_num(0)
        return weights, lse

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return self.repaired


class DetachedWeights(TextbookAttention):
    """The weights used carry gradient, the ones returned do not."""

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights.detach() + 0.0 * weights


class LseIsDetachedHalfway(_Returned):
    """The logarithm of the sum carries gradient, the maximum that is added back does too: it is counted twice."""

    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse + 0.5 * (lse - lse.detach()) if lse.requires_grad and not bool(lse.isinf().any()) else lse


MUTANTS = (
    Mutant(LseGradientIsIgnored, "gradients_flow_through_lse", "lse is returned in the graph and gives no gradient"),
    Mutant(RepairsTheWeightsThatItShows, "gradients_flow_through_weights", "NaN through the weights of dead rows"),
    Mutant(DetachedWeights, "gradients_flow_through_weights", "returned weights are detached"),
    Mutant(LseIsDetachedHalfway, "gradients_flow_through_lse", "lse's gradient is half too large"),
)
