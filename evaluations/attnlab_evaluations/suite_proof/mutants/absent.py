"""Mutants of `checks/absent.py`: padding whose contents matter. Needs torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookCosine
from attnlab_evaluations.suite_proof.mutants._shared import _length, before_validation


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


MUTANTS = (
    Mutant(NormsAreNeverZero, "absent_slots_reach_no_gradient", "0 / 0 at a zero vector"),
    Mutant(ReadsWhatTheGateCleaned, "absent_slots_reach_no_output", "a kernel is handed the uncleaned tensors"),
    Mutant(ReadsWhatTheGateCleaned, "absent_slots_reach_no_gradient", "a kernel is handed the uncleaned tensors"),
)
