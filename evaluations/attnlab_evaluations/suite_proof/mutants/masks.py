"""Mutants that hide too little, too much, or badly. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.visibility import AttentionMask
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookLinear, before_the_gate

Shape = tuple[int, int, int, int]


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


class HidesWithASmallConstant(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        sees = visible.any(-1, keepdim=True)
        return super().normalised(torch.where(visible, s, s - 1e4), visible | sees, sinks)


class CausalIsAlwaysTopLeft(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is not None and isinstance(seen.offset, int) and seen.right == 0 and call.state is None:
            return torch.ones(shape, dtype=torch.bool, device=device).tril()
        return super().visible(call, shape, device)


class CausalSeesOneKeyTooMany(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.visibility is None or not call.visibility.only_causal:
            return visible
        return visible | visible.roll(1, dims=-1) & visible.any(-1, keepdim=True)


class CausalForgetsItsOwnPosition(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.visibility is None or not call.visibility.only_causal:
            return visible
        return visible & visible.roll(-1, dims=-1)


class MaskDropsCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is not None and seen.allowed is not None and seen.right is not None:
            return seen.allowed.expand(shape)
        return super().visible(call, shape, device)


class WindowIsExclusive(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        visible = super().visible(call, shape, device)
        if seen is None or seen.left is None:
            return visible
        _, _, q, k = seen.indices(0, shape[2], 0, shape[3])
        return visible & (k > q - seen.left)


class KeyMaskHidesQueries(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        seen = call.visibility
        if seen is None or seen.key_present is None or shape[2] != shape[3]:
            return visible
        return torch.ones_like(visible) & seen.key_present[:, None, :, None]


class PaddingOfTheFirstItemServesAll(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        return visible[:1].expand(shape) if call.visibility is not None else visible


class SegmentsAreIgnored(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        seen = call.visibility
        if seen is not None and seen.query_segments is not None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class AbsentKeysStayInTheNormaliser(TextbookLinear):
    """elu(0) + 1 is 1: a key that is zeroed before the map stays in the sum of features."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        seen = call.visibility
        if seen is None or seen.key_present is None or call.state is not None or seen.right is not None:
            return answer
        group = self.num_heads // self.num_kv_heads
        q, k = (torch.nn.functional.elu(x) + 1 for x in (query, key.repeat_interleave(group, 1)))
        pairs = q @ k.transpose(-1, -2)
        total = (pairs * seen.dense()).sum(-1, keepdim=True)
        absent = (pairs * ~seen.dense()).sum(-1, keepdim=True)
        return answer._replace(out=answer.out * total / (total + absent))


class WeightsPathLosesCausal(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.need_weights and call.visibility is not None and call.visibility.only_causal:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class RememberedMask(TextbookAttention):
    """The mask of the first length is kept in the module and cut to size."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: Tensor | None = None

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.visibility is None or not call.visibility.only_causal:
            return super().visible(call, shape, device)
        if self.kept is None or self.kept.shape[2] < shape[2] or self.kept.shape[3] < shape[3]:
            self.kept = super().visible(call, shape, device)[:1, :1].clone()
        return self.kept[:, :, -shape[2] :, : shape[3]].expand(shape)


def _keep_raw(named: dict[str, Any]) -> None:
    named["module"].raw = (named["key"], named["value"])


@before_the_gate(_keep_raw)
class ReadsWhatTheGateCleaned(TextbookAttention):
    raw: tuple[Tensor, Tensor]

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, self.grouped(self.raw[0]).to(q.dtype) if call.state is None else k, call)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        raw = self.grouped(self.raw[1]).to(v.dtype)
        return weights @ (raw if raw.shape == v.shape else v)


@before_the_gate(
    lambda named: named.update(mask=named["mask"].allowed) if isinstance(named.get("mask"), AttentionMask) else None
)
class TakesOnlyTheDensePartOfAMask(TextbookAttention):
    pass


def _guess_the_axes(named: dict[str, Any]) -> None:
    mask = named.get("mask")
    if isinstance(mask, Tensor) and mask.dim() == 3:
        named["mask"] = mask[:, None]


@before_the_gate(_guess_the_axes)
class GuessesAThreeAxesMask(TextbookAttention):
    pass


class LooksIntoTheFuture(TextbookLinear):
    """The causal numerator over a normaliser of all keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if call.visibility is None or not call.visibility.only_causal or call.state is not None:
            return answer
        whole = super().attend(query, key, torch.ones_like(value), Call())
        phi_q = self.feature_map(query, role="query", positions=torch.arange(query.shape[2]))
        group = self.num_heads // self.num_kv_heads
        phi_k = self.feature_map(key, role="key", positions=torch.arange(key.shape[2])).repeat_interleave(group, 1)
        pairs = phi_q @ phi_k.transpose(-1, -2)
        visible = call.visibility.dense()
        share = (pairs * visible).sum(-1, keepdim=True) / pairs.sum(-1, keepdim=True)
        return answer._replace(out=answer.out * share.to(answer.out.dtype) * whole.out[..., :1])


MUTANTS = (
    Mutant(DeadRowsAreNaN, "dead_rows_are_zero", "softmax over a row of -inf"),
    Mutant(
        DeadRowsAreRepairedAfterwards, "dead_rows_receive_no_gradient", "nan_to_num after softmax: 0 * NaN backward"
    ),
    Mutant(FillsWithMinus1e9, "dead_rows_are_zero", "masked_fill(-1e9) turns a dead row into a mean"),
    Mutant(HidesWithASmallConstant, "hidden_pairs_have_no_influence", "-1e4 on the score leaves large scores visible"),
    Mutant(CausalIsAlwaysTopLeft, "agrees_with_definition", "the offset is ignored where lengths differ"),
    Mutant(CausalSeesOneKeyTooMany, "the_future_leaves_the_past", "triu(2) where triu(1) is meant"),
    Mutant(CausalForgetsItsOwnPosition, "agrees_with_definition", "triu(0) where triu(1) is meant"),
    Mutant(MaskDropsCausal, "agrees_with_definition", "an explicit mask replaces causal"),
    Mutant(WindowIsExclusive, "agrees_with_definition", "a window of W - 1 keys to the left"),
    Mutant(KeyMaskHidesQueries, "agrees_with_definition", "the padding mask acts on rows"),
    Mutant(PaddingOfTheFirstItemServesAll, "batch_items_are_independent", "a mask is broadcast from item 0"),
    Mutant(SegmentsAreIgnored, "packed_sequences_equal_separate_ones", "packed sequences see each other"),
    Mutant(AbsentKeysStayInTheNormaliser, "absent_keys_equal_removed_keys", "features are not zeroed after the map"),
    Mutant(WeightsPathLosesCausal, "asking_for_more_changes_nothing", "the path that returns weights drops causal"),
    Mutant(RememberedMask, "earlier_calls_leave_no_trace", "a mask of another length is reused"),
    Mutant(ReadsWhatTheGateCleaned, "absent_slots_reach_no_output", "a kernel is handed the uncleaned tensors"),
    Mutant(ReadsWhatTheGateCleaned, "absent_slots_reach_no_gradient", "a kernel is handed the uncleaned tensors"),
    Mutant(TakesOnlyTheDensePartOfAMask, "ways_to_state_a_mask_agree", "an AttentionMask loses its structure"),
    Mutant(GuessesAThreeAxesMask, "bad_inputs_are_invalid", "a mask [B, Lq, Lk] is given a head axis silently"),
    Mutant(LooksIntoTheFuture, "the_future_leaves_the_past", "the normaliser sums all keys"),
)
