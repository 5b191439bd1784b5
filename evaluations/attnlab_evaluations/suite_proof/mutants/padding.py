"""Mutants that the checks in `checks/padding.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.heads import TalkingHeadsAttention
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookCosine
from attnlab_evaluations.suite_proof.correct.textbook_tiled import TextbookTiled
from attnlab_evaluations.suite_proof.mutants._shared import _Backward, _length, _Returned, before_validation


class NegativeInfinityInTheBiasStays(TextbookAttention):
    """-inf is clamped to a large number, which hides nothing where a row has nothing else."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        return super().adjusted(s, call, scale).clamp(min=-1e30)


class SinksKeepDeadRowsAlive(TextbookAttention):
    """lse of a row that sees nothing is its sink."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if sinks is None:
            return weights, lse
        return weights, torch.where(lse == -torch.inf, sinks[:, None].to(lse.dtype), lse)


class DeadRowsAreOneBackward(_Backward):
    """exp(-inf - -inf) of a row that sees nothing."""

    def probabilities(self, s: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(s - lse)


class DeadRowsDivideByZero(TextbookTiled):
    def finished(self, m: Tensor, z: Tensor, n: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = super().finished(m, z, n, sinks)
        return torch.where(m > -torch.inf, out, n / z), lse


class SumOfAnItemsHeads(TalkingHeadsAttention):
    """Rows that one head may not see take what the others saw."""

    name, formula = "", ""
    definition: ClassVar[Any] = None
    capabilities = replace(TalkingHeadsAttention.capabilities, heads_independent=True)

    def mixed_weights(self, w: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return super().mixed_weights(w, visible.any(dim=1, keepdim=True).expand_as(visible), p)


class DeadRowsAreNaN(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            return super().normalised(s, visible, sinks)
        s = s.masked_fill(~visible, -torch.inf)
        return torch.softmax(s, dim=-1), torch.logsumexp(s, dim=-1)


class DeadRowsAreRepairedAfterwards(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is not None:
            return super().normalised(s, visible, sinks)
        s = s.masked_fill(~visible, -torch.inf)
        return torch.softmax(s, dim=-1).nan_to_num(0.0), torch.logsumexp(s, dim=-1)


class FillsWithMinus1e9(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s.masked_fill(~visible, -1e9), torch.ones_like(visible), sinks)


class LseOfDeadRowsIsFinite(_Returned):
    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse.clamp(min=-1e30)


class NormsAreNeverZero(TextbookCosine):
    """x / |x|: a zero vector, as padding holds it, is 0 / 0."""

    def normed(self, x: Tensor) -> Tensor:
        return x / _length(x)


def _keep_raw(named: dict[str, Any]) -> None:
    named["module"].raw = (named["key"], named["value"])


@before_validation(_keep_raw)
class ReadsWhatTheGateCleaned(TextbookAttention):
    raw: tuple[Tensor, Tensor]

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, self.grouped(self.raw[0]).to(q.dtype) if call.state is None else k, call)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        raw = self.grouped(self.raw[1]).to(v.dtype)
        return weights @ (raw if raw.shape == v.shape else v)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(NegativeInfinityInTheBiasStays, "dead_rows_are_zero", "-inf in a bias becomes a large number"),
    Mutant(SinksKeepDeadRowsAlive, "dead_rows_are_zero", "lse of a dead row with a sink"),
    Mutant(DeadRowsAreOneBackward, "dead_rows_receive_no_gradient", "NaN backward in rows that see nothing"),
    Mutant(DeadRowsDivideByZero, "dead_rows_are_zero", "0 / 0 in rows that see nothing"),
    Mutant(SumOfAnItemsHeads, "dead_rows_are_zero", "a row that is dead in one head takes weight from the others"),
    Mutant(DeadRowsAreNaN, "dead_rows_are_zero", "softmax over a row of -inf"),
    Mutant(
        DeadRowsAreRepairedAfterwards, "dead_rows_receive_no_gradient", "nan_to_num after softmax: 0 * NaN backward"
    ),
    Mutant(FillsWithMinus1e9, "dead_rows_are_zero", "masked_fill(-1e9) turns a dead row into a mean"),
    Mutant(LseOfDeadRowsIsFinite, "dead_rows_are_zero", "-1e30 for -inf"),
    Mutant(NormsAreNeverZero, "padding_receives_no_gradient", "0 / 0 at a zero vector"),
    Mutant(ReadsWhatTheGateCleaned, "padding_does_not_affect_outputs", "a kernel is handed the uncleaned tensors"),
    Mutant(ReadsWhatTheGateCleaned, "padding_receives_no_gradient", "a kernel is handed the uncleaned tensors"),
)
