"""Mutants that the checks in `checks/weights.py` must fail. Needs torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookDistance, TextbookDot, wide
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookMaps
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _Returned

Shape = tuple[int, int, int, int]


class SinksAreNoReference(TextbookTiled):
    """exp(sink - m) with the maximum of the scores alone: a large sink overflows."""

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is None:
            return super().finished(m, z, n, sinks)
        alive = m > -torch.inf
        z = torch.where(alive, z + torch.exp(sinks[:, None, None] - m), 1)
        return torch.where(alive, n / z, 0), torch.where(alive, m + z.log(), -torch.inf)


class SubtractsTheTilesMaximum(TextbookDot):
    """It cancels in one tile's softmax; not in lse, and not between tiles."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        s = wide(query) @ wide(key).transpose(-1, -2)
        return s - s.amax(-1, keepdim=True)


class ForgetsTheQuerysNorm(TextbookDistance):
    """It cancels in the softmax, and not in lse."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return 2 * wide(query) @ wide(key).transpose(-1, -2) - wide(key).square().sum(-1)[..., None, :]


class WeightsAfterDropout(TextbookAttention):
    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return used


class LseOfTheLastSplit(TextbookAttention):
    """Keys are split at 256 and out is merged; lse is that of the last part."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if s.shape[-1] > 256 and sinks is None:
            lse = super().normalised(s[..., 256:], visible[..., 256:], sinks)[1]
        return weights, lse


class WeightsEndAt256(TextbookAttention):
    """The buffer that weights are returned in is 256 keys wide."""

    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return weights * (torch.arange(weights.shape[-1], device=weights.device) < 256)


class LseInBaseTwo(TextbookTiled):
    """The log2 domain of a kernel leaks out."""

    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = super().finished(m, z, n, sinks)
        return out, lse + torch.where(lse > -torch.inf, z.log2() - z.log(), 0)


class SinksAreLeftOutOfTheNormaliser(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s, visible, None)


class LseToTheBaseTwo(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return weights, lse / math.log(2)


class WeightsAreLogarithms(TextbookAttention):
    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return torch.log(weights.clamp_min(1e-12))


class WeightsPathLosesCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.need_weights and call.visibility is not None and call.visibility.only_causal:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class WeightsAreTransposed(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights.transpose(-1, -2).contiguous() if weights.shape[-1] == weights.shape[-2] else weights


class WeightsOfTheFirstItem(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights[:1].expand(weights.shape).clone()


class WeightsSumToOneDespiteSinks(_Returned):
    """They are normalised again, so that they no longer are what averaged the values."""

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total == 0, 1, total)


class EffectiveWeightsLoseTheirGroup(TextbookMaps):
    """Effective weights are computed with the tiled order of key heads."""

    def _weights(self, q: Tensor, k: Tensor, visible: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return super()._weights(q, k.repeat(1, group, 1, 1), visible)


class LseIsTheMaximum(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        top = s.masked_fill(~visible, -torch.inf).amax(-1)
        return weights, torch.where(lse == -torch.inf, lse, top)


class LseForgetsTheBias(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse if call.bias is None else lse - call.bias.to(lse.dtype).mean((-1, -2)).unsqueeze(-1)


class LseIsRoundedOnTheWay(_Returned):
    """Scores are summed up in bfloat16, and the logarithm returned in float32."""

    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse if lse.dtype == torch.float64 else lse.bfloat16().float()


class WeightsPathForgetsTheScale(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5) if call.need_weights else super().scale(call)


class LsePathForgetsTheSoftcap(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        return s if call.need_lse else super().capped(s, call)


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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(SinksAreNoReference, "lse_matches_definition", "a large sink overflows"),
    Mutant(SubtractsTheTilesMaximum, "lse_matches_definition", "a maximum that lse misses"),
    Mutant(ForgetsTheQuerysNorm, "lse_matches_definition", "a term that cancels in the softmax alone"),
    Mutant(WeightsAfterDropout, "weights_of_a_row_sum_to_one", "weights are returned after dropout"),
    Mutant(LseOfTheLastSplit, "lse_matches_definition", "lse of the last part of the keys"),
    Mutant(WeightsEndAt256, "weights_match_definition", "weights past a buffer's 256 keys are 0"),
    Mutant(LseInBaseTwo, "lse_matches_definition", "lse in base 2"),
    Mutant(SinksAreLeftOutOfTheNormaliser, "lse_matches_definition", "sinks are accepted and dropped"),
    Mutant(LseToTheBaseTwo, "lse_matches_definition", "a kernel's exp2 domain leaks out"),
    Mutant(WeightsAreLogarithms, "weights_match_definition", "log weights are returned"),
    Mutant(
        WeightsPathLosesCausal,
        "requesting_weights_or_lse_changes_no_output",
        "the path that returns weights drops causal",
    ),
    Mutant(WeightsAreTransposed, "weights_match_definition", "weights[k, q]"),
    Mutant(WeightsOfTheFirstItem, "out_is_weights_times_value", "item 0's weights for all"),
    Mutant(WeightsSumToOneDespiteSinks, "out_is_weights_times_value", "weights are normalised again"),
    Mutant(EffectiveWeightsLoseTheirGroup, "out_is_weights_times_value", "k0, k1, k0, k1 in the weights alone"),
    Mutant(LseIsTheMaximum, "lse_matches_definition", "the maximum without the sum"),
    Mutant(LseForgetsTheBias, "lse_matches_definition", "lse without bias"),
    Mutant(
        WeightsPathForgetsTheScale, "requesting_weights_or_lse_changes_no_output", "the path with weights drops scale="
    ),
    Mutant(LsePathForgetsTheSoftcap, "requesting_weights_or_lse_changes_no_output", "the path with lse drops softcap="),
    Mutant(LseIsRoundedOnTheWay, "lse_matches_definition", "lse of a bfloat16 sum, cast up"),
    Mutant(LseGradientIsIgnored, "gradients_flow_through_lse", "lse is returned in the graph and gives no gradient"),
    Mutant(RepairsTheWeightsThatItShows, "gradients_flow_through_weights", "NaN through the weights of dead rows"),
    Mutant(DetachedWeights, "gradients_flow_through_weights", "returned weights are detached"),
    Mutant(LseIsDetachedHalfway, "gradients_flow_through_lse", "lse's gradient is half too large"),
)
