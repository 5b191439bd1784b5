"""Mutants in what is returned beside out: weights and lse. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._sums import TextbookMaps
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class _Returned(TextbookAttention):
    """The answer's weights and lse pass through one more step."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if answer.weights is not None:
            answer = answer._replace(weights=self.weights_of(answer.weights, call))
        return answer if answer.lse is None else answer._replace(lse=self.lse_of(answer.lse, call))

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights

    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse


class WeightsAreAMeanOverHeads(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights.mean(1)


class WeightsAreTransposed(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights.transpose(-1, -2).contiguous() if weights.shape[-1] == weights.shape[-2] else weights


class WeightsOfTheFirstItem(_Returned):
    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights[:1].expand(weights.shape).clone()


class WeightsShareOneBuffer(_Returned):
    """Weights of a size are written into one buffer, call after call."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.buffer: dict[Any, Tensor] = {}

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        if weights.requires_grad:
            return weights
        key = (tuple(weights.shape), weights.dtype)
        return self.buffer.setdefault(key, torch.empty_like(weights)).copy_(weights)


class WeightsSumToOneDespiteSinks(_Returned):
    """They are normalised again, so that they no longer are what averaged the values."""

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total == 0, 1, total)


class EffectiveWeightsLoseTheirGroup(TextbookMaps):
    """Effective weights are computed with the tiled order of key heads."""

    def _weights(self, q: Tensor, k: Tensor, seen: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return super()._weights(q, k.repeat(1, group, 1, 1), seen)


class LseIsTheMaximum(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        top = s.masked_fill(~visible, -torch.inf).amax(-1)
        return weights, torch.where(lse == -torch.inf, lse, top)


class LseForgetsTheBias(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse if call.bias is None else lse - call.bias.to(lse.dtype).mean((-1, -2)).unsqueeze(-1)


class LseOfDeadRowsIsFinite(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse.clamp(min=-1e30)


class LseHasFourAxes(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse.unsqueeze(-1)


class LseIsDetachedHalfway(_Returned):
    """The logarithm of the sum carries gradient, the maximum that is added back does too: it is counted twice."""

    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse + 0.5 * (lse - lse.detach()) if lse.requires_grad and not bool(lse.isinf().any()) else lse


class LseIsRoundedToTheQuery(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        return answer if answer.lse is None else answer._replace(lse=answer.lse.to(query.dtype))


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


class ClaimsANullKey(TextbookAttention):
    """No slot takes weight: the claim switches laws off that it obeys."""

    capabilities = replace(TextbookAttention.capabilities, null_key=True)


MUTANTS = (
    Mutant(WeightsAreAMeanOverHeads, "shapes_and_dtypes", "weights [B, Lq, Lk]"),
    Mutant(WeightsAreTransposed, "weights_match_definition", "weights[k, q]"),
    Mutant(WeightsOfTheFirstItem, "out_is_weights_times_value", "item 0's weights for all"),
    Mutant(WeightsShareOneBuffer, "outputs_own_their_memory", "a static buffer for weights"),
    Mutant(WeightsSumToOneDespiteSinks, "out_is_weights_times_value", "weights are normalised again"),
    Mutant(EffectiveWeightsLoseTheirGroup, "out_is_weights_times_value", "k0, k1, k0, k1 in the weights alone"),
    Mutant(LseIsTheMaximum, "lse_matches_definition", "the maximum without the sum"),
    Mutant(LseForgetsTheBias, "lse_matches_definition", "lse without bias"),
    Mutant(LseOfDeadRowsIsFinite, "dead_rows_are_zero", "-1e30 for -inf"),
    Mutant(LseHasFourAxes, "shapes_and_dtypes", "lse [B, H, Lq, 1]"),
    Mutant(LseIsDetachedHalfway, "gradients_flow_through_lse", "lse's gradient is half too large"),
    Mutant(LseIsRoundedToTheQuery, "shapes_and_dtypes", "lse in half precision"),
    Mutant(WeightsPathForgetsTheScale, "asking_for_more_changes_nothing", "the path with weights drops scale="),
    Mutant(LsePathForgetsTheSoftcap, "asking_for_more_changes_nothing", "the path with lse drops softcap="),
    Mutant(ClaimsANullKey, "null_key_takes_weight", "a null slot is claimed that is not there"),
    Mutant(LseIsRoundedOnTheWay, "lse_matches_definition", "lse of a bfloat16 sum, cast up"),
)
