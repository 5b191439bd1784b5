"""Mutants inside `update` and `read` of a recurrence. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab_evaluations.suite_proof.mutants._sums import TextbookGatedDelta
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookDelta

Gates = Mapping[str, Tensor]


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)


class ErrorHasTheOtherSign(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return 2 * memory - super().update(memory, key, value, gates)


class RecallsWithoutBeta(TextbookDelta):
    """beta scales what is written twice: beta v - beta^2 recalled."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        beta = gates["beta"].unsqueeze(-1)
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        return memory + _outer(key, beta * (value - beta * recalled))


class BetaOfTheFirstHead(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": gates["beta"][:, :1].expand_as(gates["beta"])})


class BetaIsSquashedAgain(TextbookDelta):
    """A sigmoid over what is a sigmoid already."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": torch.sigmoid(gates["beta"])})


class NormalisesKeysItself(TextbookDelta):
    """The paper's keys have unit length: here they are made so, which the formula does not say."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, torch.nn.functional.normalize(key, dim=-1), value, gates)


class MemoryIsTransposed(TextbookDelta):
    """S k where S^T k is meant; it shows where both widths agree, and fails where they do not."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        if key.shape[-1] != value.shape[-1]:
            return super().update(memory, key, value, gates)
        recalled = torch.einsum("bhed,bhd->bhe", memory, key)
        return memory + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class TruncatesItsPast(TextbookDelta):
    """The recalled part is detached: backpropagation through time ends at each token."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        recalled = torch.einsum("bhde,bhd->bhe", memory.detach(), key)
        return memory + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class BetaHasNoGradient(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {"beta": gates["beta"].detach()})


class StoresInHalfPrecision(TextbookDelta):
    """Each token's memory is rounded to bfloat16."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, gates).bfloat16().to(memory.dtype)


class ClampsItsMemory(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, gates).clamp(-2.0, 2.0)


class ReadsScaled(TextbookDelta):
    """The read divides by sqrt(d), and so does the family."""

    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, query) / math.sqrt(self.key_dim)


class ReadsNormed(TextbookDelta):
    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, torch.nn.functional.normalize(query, dim=-1))


class GroupsReadOneQuery(TextbookDelta):
    """All query heads of a group read with the first one's query."""

    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        return super().read(memory, query[:, :, :1].expand_as(query))


class RemembersInItself(TextbookDelta):
    """The memory lives in the module, and the next call starts from it."""

    last: Tensor | None = None

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        start = self.last if self.last is not None and self.last.shape == memory.shape else None
        if start is not None and not bool(memory.any()) and not memory.requires_grad:
            memory = start.to(memory)
        following = super().update(memory, key, value, gates)
        self.last = following.detach()
        return following


class ReadsBeforeWriting(TextbookDelta):
    """A query reads before the token at its position is written."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        seen = call.visibility
        if seen is None or seen.right is None or call.state is not None or not isinstance(seen.offset, int):
            return super().attend(query, key, value, call)
        seen.offset -= 1
        try:
            return super().attend(query, key, value, call)
        finally:
            seen.offset += 1


class DecaysAfterWriting(TextbookGatedDelta):
    """exp(g) fades what was just written as well."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        plain = super().update(memory, key, value, {**gates, "log_decay": torch.zeros_like(gates["log_decay"])})
        return plain * gates["log_decay"].exp()[..., None, None]


class RecallsFromTheUnfaded(TextbookGatedDelta):
    """The error is that of the memory before its decay."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        decay = gates["log_decay"].exp()[..., None, None]
        recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        return memory * decay + _outer(key, gates["beta"].unsqueeze(-1) * (value - recalled))


class DecayIsNoLogarithm(TextbookGatedDelta):
    """1 + g for exp(g)."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        other = torch.log1p(gates["log_decay"].clamp(min=-0.99))
        return super().update(memory, key, value, {**gates, "log_decay": other})


class DecayIsBounded(TextbookGatedDelta):
    """g below -5 is cut off."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        return super().update(memory, key, value, {**gates, "log_decay": gates["log_decay"].clamp(min=-5)})


class GatesAreSwapped(TextbookGatedDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Gates) -> Tensor:
        beta, decay = gates["beta"], gates["log_decay"]
        return super().update(memory, key, value, {"beta": decay.exp(), "log_decay": beta.log()})


class PaddingDecays(TextbookGatedDelta):
    """An absent token fades the memory as a present one of no key would."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        seen = call.visibility
        if seen is None or seen.key_present is None or call.state is not None or seen.right is not None:
            return answer
        absent = (~seen.key_present).sum(-1).to(answer.out.dtype)
        return answer._replace(out=answer.out * (0.5**absent)[:, None, None, None])


MUTANTS = (
    Mutant(ErrorHasTheOtherSign, "agrees_with_definition", "S - beta k (v - S^T k)"),
    Mutant(RecallsWithoutBeta, "agrees_with_definition", "beta acts twice on what is recalled"),
    Mutant(BetaOfTheFirstHead, "agrees_with_definition", "one head's gate for all"),
    Mutant(BetaIsSquashedAgain, "agrees_with_definition", "a second sigmoid"),
    Mutant(NormalisesKeysItself, "agrees_on_special_contents", "keys are made to unit length inside"),
    Mutant(MemoryIsTransposed, "agrees_with_definition", "S k where S^T k is meant"),
    Mutant(TruncatesItsPast, "gradients_match_definition", "the recalled part is detached"),
    Mutant(BetaHasNoGradient, "gradients_match_definition", "the gate is detached"),
    Mutant(StoresInHalfPrecision, "agrees_with_definition", "the memory is rounded at each token"),
    Mutant(ClampsItsMemory, "agrees_on_special_contents", "the memory is clamped"),
    Mutant(ReadsScaled, "agrees_with_definition", "scale twice"),
    Mutant(ReadsNormed, "agrees_with_definition", "queries are normed inside"),
    Mutant(GroupsReadOneQuery, "grouped_heads_equal_repeated_heads", "a group reads with one query"),
    Mutant(RemembersInItself, "earlier_calls_leave_no_trace", "the memory survives the call"),
    Mutant(ReadsBeforeWriting, "agrees_with_definition", "the token at a query's position is not seen"),
    Mutant(DecaysAfterWriting, "agrees_with_definition", "decay after the update"),
    Mutant(RecallsFromTheUnfaded, "agrees_with_definition", "the error forgets the decay"),
    Mutant(DecayIsNoLogarithm, "agrees_with_definition", "1 + g where exp(g) is meant"),
    Mutant(DecayIsBounded, "agrees_at_the_ends_of_arguments", "strong decay is cut off"),
    Mutant(GatesAreSwapped, "agrees_with_definition", "beta and decay are swapped"),
    Mutant(PaddingDecays, "absent_keys_equal_removed_keys", "padding fades the memory"),
)
