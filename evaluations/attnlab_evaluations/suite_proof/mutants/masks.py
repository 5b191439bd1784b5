"""Mutants that the checks in `checks/masks.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attnlab import AttentionMask, AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.heads import TalkingHeadsAttention
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookChunked, TextbookGatedDelta
from attnlab_evaluations.suite_proof.mutants._shared import _Exp, before_validation

Shape = tuple[int, int, int, int]
Role = Literal["query", "key"]


class PositionsInTheQuerysDtype(TextbookAttention):
    """arange(dtype=query.dtype): bfloat16 counts to 256."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.counted_in = query.dtype
        return super().attend(query, key, value, call)

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is None or not visibility.only_causal or visibility.query_positions.dim() != 1:
            return super().visible(call, shape, device)
        q, k = (x.to(self.counted_in) for x in (visibility.query_positions, visibility.key_positions))
        visibility.right = None
        rest = super().visible(call, shape, device)
        visibility.right = 0
        return rest & (k <= q[:, None])


class MasksByMultiplication(TextbookAttention):
    """score * mask: hidden pairs score 0 and take weight."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        sees = visible.any(-1, keepdim=True)
        return super().normalised(torch.where(visible, s, 0), visible | sees, sinks)


class ClaimsIsolation(TextbookAttention):
    """0 * NaN in the product with value."""

    capabilities = replace(TextbookAttention.capabilities, isolates_nonfinite=True)


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
        shown_pairs = super().visible(call, shape, device)
        group = self.num_heads // self.num_kv_heads
        return shown_pairs[:, ::group].repeat_interleave(group, dim=1)


class SoftmaxOverTheTokens(_Exp):
    """Keys are normalised over the length: causal queries see the future in it, and padding counts."""

    def feature_map(self, x: Tensor, *, role: Role, positions: Tensor) -> Tensor:
        return torch.softmax(x, dim=-2 if role == "key" else -1)


class ChunkSeesItsOwnFuture(TextbookChunked):
    def inner(self, products: Tensor) -> Tensor:
        return products


class HidesWithASmallConstant(TextbookAttention):
    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        sees = visible.any(-1, keepdim=True)
        return super().normalised(torch.where(visible, s, s - 1e4), visible | sees, sinks)


class CausalSeesOneKeyTooMany(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.visibility is None or not call.visibility.only_causal:
            return visible
        return visible | visible.roll(1, dims=-1) & visible.any(-1, keepdim=True)


class AbsentKeysStayInTheNormaliser(TextbookLinear):
    """elu(0) + 1 is 1: a key that is zeroed before the map stays in the sum of features."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        visibility = call.visibility
        if (
            visibility is None
            or visibility.key_present is None
            or call.state is not None
            or visibility.right is not None
        ):
            return answer
        group = self.num_heads // self.num_kv_heads
        q, k = (torch.nn.functional.elu(x) + 1 for x in (query, key.repeat_interleave(group, 1)))
        pairs = q @ k.transpose(-1, -2)
        total = (pairs * visibility.dense()).sum(-1, keepdim=True)
        absent = (pairs * ~visibility.dense()).sum(-1, keepdim=True)
        return answer._replace(out=answer.out * total / (total + absent))


@before_validation(
    lambda named: named.update(mask=named["mask"].allowed) if isinstance(named.get("mask"), AttentionMask) else None
)
class TakesOnlyTheDensePartOfAMask(TextbookAttention):
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


class PaddingDecays(TextbookGatedDelta):
    """An absent token fades the memory as a present one of no key would."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        visibility = call.visibility
        if (
            visibility is None
            or visibility.key_present is None
            or call.state is not None
            or visibility.right is not None
        ):
            return answer
        absent = (~visibility.key_present).sum(-1).to(answer.out.dtype)
        return answer._replace(out=answer.out * (0.5**absent)[:, None, None, None])


class KeepsABiasByItsAddress(TextbookAttention):
    """A bias is cast once, and found again by its address."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.bias is None or call.bias.requires_grad or torch.compiler.is_compiling():
            return super().adjusted(s, call, scale)
        kept = self.__dict__.setdefault("kept", {})
        known = kept.setdefault((call.bias.data_ptr(), call.bias.shape, call.bias.dtype), call.bias.clone())
        return super().adjusted(
            s, Call(visibility=call.visibility, softcap=call.softcap, score_mod=call.score_mod, bias=known), scale
        )


MUTANTS: tuple[Mutant, ...] = (
    Mutant(PositionsInTheQuerysDtype, "hidden_pairs_have_no_influence", "positions are counted in bfloat16"),
    Mutant(MasksByMultiplication, "hidden_pairs_have_no_influence", "score * mask"),
    Mutant(ClaimsIsolation, "hidden_nonfinite_pairs_are_isolated", "0 * NaN"),
    Mutant(HiddenScoresTalk, "hidden_pairs_have_no_influence", "scores move from head to head before they are hidden"),
    Mutant(HiddenPairsTakeWeight, "hidden_pairs_have_no_influence", "weights move from head to head onto hidden pairs"),
    Mutant(OneMaskForTheGroup, "hidden_pairs_have_no_influence", "the first head of a group decides for all of it"),
    Mutant(SoftmaxOverTheTokens, "causality", "features are normalised over the length"),
    Mutant(ChunkSeesItsOwnFuture, "causality", "no causal mask inside a chunk"),
    Mutant(HidesWithASmallConstant, "hidden_pairs_have_no_influence", "-1e4 on the score leaves large scores visible"),
    Mutant(CausalSeesOneKeyTooMany, "causality", "triu(2) where triu(1) is meant"),
    Mutant(AbsentKeysStayInTheNormaliser, "padded_keys_equal_removed_keys", "features are not zeroed after the map"),
    Mutant(
        TakesOnlyTheDensePartOfAMask, "mask_arguments_and_mask_object_agree", "an AttentionMask loses its structure"
    ),
    Mutant(LooksIntoTheFuture, "causality", "the normaliser sums all keys"),
    Mutant(PaddingDecays, "padded_keys_equal_removed_keys", "padding fades the memory"),
    Mutant(KeepsABiasByItsAddress, "tensors_are_read_anew_in_each_call", "a bias is kept by its address"),
)
