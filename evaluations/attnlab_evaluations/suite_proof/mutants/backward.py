"""Mutants of `checks/backward.py`: wrong gradients of long inputs and of a tensor in two roles. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, Tile
from attnlab_evaluations.suite_proof.mutants._shared import _Backward


class TableOf1024Keys(_Backward):
    """dK is collected in a table of 1024 rows; what lies past it is lost."""

    side = 256

    def found(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own._replace(key=own.key * (t.k0 < 1024))


class TellsTensorsApartByIdentity(TextbookAttention):
    """query is key: self-attention, which is taken to be symmetric."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        s = super().scores(q, k, call)
        return s.triu() + s.triu(1).transpose(-1, -2) if self.same else s

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.same = query is key and torch.is_grad_enabled()
        return super().attend(query, key.detach() if self.same else key, value, call)


MUTANTS = (
    Mutant(TableOf1024Keys, "long_gradients_agree_by_rows", "dK past 1024 keys is lost"),
    Mutant(TellsTensorsApartByIdentity, "one_tensor_may_play_every_role", "query is key"),
)
