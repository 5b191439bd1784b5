"""Mutants inside the author's own method: scale, order, heads, parameters. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.call import Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, TextbookLinear


class ScaledByTheModelWidth(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float((self.num_heads * self.key_dim) ** -0.5) if call.scale is None else super().scale(call)


class IgnoresScale(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5)


class SoftcapBeforeScale(TextbookAttention):
    def capped(self, s: Tensor, call: Call) -> Tensor:
        if call.softcap is None:
            return s
        scale = self.scale(call)
        return call.softcap * torch.tanh(s / scale / call.softcap) * scale


class BiasBeforeSoftcap(TextbookAttention):
    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        biased = s if call.bias is None else s + call.bias.to(s.dtype)
        return self.modified(self.capped(biased, call), call)


class SinksAreLeftOutOfTheNormaliser(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s, visible, None)


class HeadsAreTiled(TextbookAttention):
    """k0, k1, k0, k1 where k0, k0, k1, k1 is meant."""

    def grouped(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.num_heads // self.num_kv_heads, 1, 1)


class HeadsTalk(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s + 0.1 * s.mean(dim=1, keepdim=True), visible, sinks)


class SubtractsNoMaximum(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            return super().normalised(s, visible, sinks)
        e = torch.exp(s).masked_fill(~visible, 0)
        total = e.sum(-1, keepdim=True)
        return e / torch.where(total == 0, 1, total), total.squeeze(-1).log()


class OneMoreInTheNormaliser(TextbookAttention):
    """softmax1, e / (1 + sum e), claimed to be softmax."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(s.shape[1], dtype=s.dtype, device=s.device)
        return super().normalised(s, visible, zero if sinks is None else sinks)


class LseToTheBaseTwo(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        return weights, lse / math.log(2)


class WeightsAreLogarithms(TextbookAttention):
    def shown(self, weights: Tensor, used: Tensor) -> Tensor:
        return torch.log(weights.clamp_min(1e-12))


class LeansOnKeyPosition(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) + 0.1 * torch.arange(k.shape[2], device=k.device)


class LeansOnQueryPosition(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) * (1 + 0.1 * torch.arange(q.shape[2], device=q.device)[:, None])


class ClampsTheOutput(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v, visible).clamp(-1.0, 1.0)


class _Additive(TextbookAttention):
    formula = "additive"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        heads, width = self.num_heads, self.head_dim
        self.W_q = nn.Parameter(torch.randn(heads, width, self.head_dim) * self.head_dim**-0.5)
        self.W_k = nn.Parameter(torch.randn(heads, width, self.key_dim) * self.key_dim**-0.5)
        self.v = nn.Parameter(torch.randn(heads, width))

    def scale(self, call: Call) -> float:
        return 1.0 if call.scale is None else call.scale


class TanhBeforeTheSum(_Additive):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        a = torch.tanh(torch.einsum("had,bhid->bhia", self.W_q.to(q.dtype), q)).unsqueeze(-2)
        b = torch.tanh(torch.einsum("had,bhjd->bhja", self.W_k.to(q.dtype), k)).unsqueeze(-3)
        return torch.einsum("ha,bhija->bhij", self.v.to(q.dtype), a + b)


class SwappedProjections(_Additive):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        a = torch.einsum("had,bhid->bhia", self.W_k.to(q.dtype), q).unsqueeze(-2)
        b = torch.einsum("had,bhjd->bhja", self.W_q.to(q.dtype), k).unsqueeze(-3)
        return torch.einsum("ha,bhija->bhij", self.v.to(q.dtype), torch.tanh(a + b))


class TransposedGeneralScore(TextbookAttention):
    """k^T W_a q where q^T W_a k is meant."""

    formula = "multiplicative"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.W_a = nn.Parameter(torch.randn(self.num_heads, self.head_dim, self.key_dim) * self.key_dim**-0.5)

    def scale(self, call: Call) -> float:
        return 1.0 if call.scale is None else call.scale

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return torch.einsum("bhie,hde,bhjd->bhij", q, self.W_a.to(q.dtype), k)


class EluWithoutOne(TextbookLinear):
    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.nn.functional.elu(x)


class StabilisedPerKey(TextbookLinear):
    """exp features whose maximum is taken per key: it no longer cancels."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"feature_map": "exp"}

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.exp(x - x.amax(dim=-1, keepdim=True)) if x.shape[2] else torch.exp(x)


# `options` above are facts of the mutant, not arguments of its constructor.
StabilisedPerKey.capabilities = replace(TextbookLinear.capabilities)


class WritesWithoutPrediction(TextbookDelta):
    """A plain sum beta k v^T: the error term is missing."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return memory + (key * gates["beta"].unsqueeze(-1)).unsqueeze(-1) * value.unsqueeze(-2)


class BetaScalesTheValueOnly(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        step = gates["beta"].unsqueeze(-1) * value - recalled
        return memory + key.unsqueeze(-1) * step.unsqueeze(-2)


MUTANTS = (
    Mutant(ScaledByTheModelWidth, "agrees_with_definition", "sqrt(embed) where sqrt(head) is meant"),
    Mutant(IgnoresScale, "scale_zero_gives_the_mean", "scale= does not arrive"),
    Mutant(SoftcapBeforeScale, "agrees_with_definition", "softcap on unscaled scores"),
    Mutant(BiasBeforeSoftcap, "agrees_with_definition", "bias is capped too"),
    Mutant(SinksAreLeftOutOfTheNormaliser, "lse_matches_definition", "sinks are accepted and dropped"),
    Mutant(HeadsAreTiled, "grouped_heads_equal_repeated_heads", "repeat where repeat_interleave is meant"),
    Mutant(HeadsTalk, "heads_are_independent", "a mean over heads enters the scores"),
    Mutant(SubtractsNoMaximum, "survives_large_scores", "exp overflows"),
    Mutant(OneMoreInTheNormaliser, "equal_values_come_through", "softmax1 under the name of softmax"),
    Mutant(OneMoreInTheNormaliser, "one_visible_key_copies_its_value", "softmax1 under the name of softmax"),
    Mutant(OneMoreInTheNormaliser, "duplicated_keys_change_nothing", "softmax1 under the name of softmax"),
    Mutant(LseToTheBaseTwo, "lse_matches_definition", "a kernel's exp2 domain leaks out"),
    Mutant(WeightsAreLogarithms, "weights_match_definition", "log weights are returned"),
    Mutant(LeansOnKeyPosition, "permuting_keys_changes_nothing", "position_free is claimed beside a positional score"),
    Mutant(LeansOnQueryPosition, "permuting_queries_permutes_outputs", "the temperature depends on the row"),
    Mutant(ClampsTheOutput, "linear_in_value", "outputs are clamped"),
    Mutant(TanhBeforeTheSum, "agrees_with_definition", "tanh(a) + tanh(b) where tanh(a + b) is meant"),
    Mutant(SwappedProjections, "agrees_with_definition", "W_q and W_k are swapped"),
    Mutant(TransposedGeneralScore, "agrees_with_definition", "W_a is transposed"),
    Mutant(EluWithoutOne, "agrees_with_definition", "elu without + 1"),
    Mutant(StabilisedPerKey, "agrees_with_definition", "a maximum per key changes relative weights"),
    Mutant(WritesWithoutPrediction, "agrees_with_definition", "the delta rule without its delta"),
    Mutant(BetaScalesTheValueOnly, "agrees_with_definition", "beta misses the recalled part"),
)
