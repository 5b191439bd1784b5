"""Mutants that confuse what differs by head or by item: masks, biases, sinks. Needs torch.

Those that mix heads have no definition, as the first version of a new variant has none: the laws must find them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.correct.heads import TalkingHeadsAttention
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class HiddenScoresTalk(TalkingHeadsAttention):
    name, formula = "", ""
    definition: ClassVar[Any] = None

    def mixed_scores(self, s: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("hg,bgij->bhij", p, self.raw.masked_fill(self.raw == -torch.inf, 0))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        group = self.num_heads // self.num_kv_heads
        self.raw = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * self.key_dim**-0.5
        return super().attend(query, key, value, call)


class HiddenPairsTakeWeight(TalkingHeadsAttention):
    name, formula = "", ""
    definition: ClassVar[Any] = None

    def mixed_weights(self, w: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("hg,bgij->bhij", p, w)


class OneMaskForTheGroup(TextbookAttention):
    """Grouped heads share a tile, and the tile's mask is that of the group's first head."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        seen = super().visible(call, shape, device)
        group = self.num_heads // self.num_kv_heads
        return seen[:, ::group].repeat_interleave(group, dim=1)


class OneMaskForAllItems(TextbookAttention):
    """A pair is computed where any item of the batch needs it, and hidden nowhere else."""

    formula = ""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        return super().visible(call, shape, device).any(dim=0, keepdim=True).expand(shape)


class SinksOfAllHeads(TextbookAttention):
    formula = ""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().normalised(s, visible, None if sinks is None else sinks.mean().expand(sinks.shape))


class BiasOfTheNextHead(TextbookAttention):
    formula = ""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None:
            call.bias = call.bias.roll(1, dims=1)
        return super().adjusted(s, call, scale)


class BiasOfTheNextItem(TextbookAttention):
    formula = ""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is not None:
            call.bias = call.bias.roll(1, dims=0)
        return super().adjusted(s, call, scale)


class SumOfAnItemsHeads(TalkingHeadsAttention):
    """Rows that one head may not see take what the others saw."""

    name, formula = "", ""
    definition: ClassVar[Any] = None
    known_failures = MappingProxyType({})

    def mixed_weights(self, w: Tensor, visible: Tensor, p: Tensor) -> Tensor:
        return super().mixed_weights(w, visible.any(dim=1, keepdim=True).expand_as(visible), p)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(HiddenScoresTalk, "hidden_pairs_have_no_influence", "scores move from head to head before they are hidden"),
    Mutant(HiddenPairsTakeWeight, "hidden_pairs_have_no_influence", "weights move from head to head onto hidden pairs"),
    Mutant(SumOfAnItemsHeads, "dead_rows_are_zero", "a row that is dead in one head takes weight from the others"),
    Mutant(OneMaskForTheGroup, "hidden_pairs_have_no_influence", "the first head of a group decides for all of it"),
    Mutant(OneMaskForAllItems, "batch_items_are_independent", "a mask is the union over the batch"),
    Mutant(SinksOfAllHeads, "heads_are_independent", "sinks are averaged over heads"),
    Mutant(BiasOfTheNextHead, "heads_are_independent", "a bias is taken from the neighbouring head"),
    Mutant(BiasOfTheNextItem, "batch_items_are_independent", "a bias is taken from the neighbouring item"),
)
