"""Mutants of states that are sums: linearised attention and recurrences. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.families.recurrence import RecurrentAttention
from attnlab.state import LinearState, RecurrentState, State
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookDelta, TextbookLinear


class ForgetsTheNormaliser(TextbookLinear):
    """The sum of features is of the last call only, the sum of products of all of them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, LinearState) or not isinstance(call.state, LinearState):
            return answer
        return answer._replace(state=replace(answer.state, z=answer.state.z - call.state.z))


class PaddingOfABlockCounts(TextbookLinear):
    """Chunks are padded to whole blocks with zeros, whose features are 1 and enter the normaliser of the state."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, LinearState):
            return answer
        return answer._replace(state=replace(answer.state, z=answer.state.z + -key.shape[2] % 4))


class DropsTheLastBlock(TextbookLinear):
    """Of a chunk longer than a block only whole blocks of 64 enter the state."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        tail = key.shape[2] % 64
        if not isinstance(answer.state, LinearState) or key.shape[2] < 64 or not tail:
            return answer
        assert call.visibility is not None
        k, v = self._features(key, value, call.visibility, key.shape[2] - tail, key.shape[2])
        kept = replace(answer.state, kv=answer.state.kv - k.transpose(-1, -2) @ v, z=answer.state.z - k.sum(-2))
        return answer._replace(state=kept)


class AddsThePastToEveryBlock(TextbookDelta):
    """Every block of 64 starts from what the call started from, so a long chunk forgets its own first blocks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if call.state is None or key.shape[2] <= 64 or query.shape[2] != key.shape[2]:
            return super().attend(query, key, value, call)
        answer = super().attend(query, key, value, call)
        start = key.shape[2] // 64 * 64
        if start == key.shape[2] or call.visibility is None or answer.state is None:
            return answer
        gates = {n: g[:, :, start:] for n, g in (call.gates or {}).items()}
        tail = super().attend(
            query[:, :, start:],
            key[:, :, start:],
            value[:, :, start:],
            Call(call.visibility, gates=gates, state=call.state),
        )
        assert tail.state is not None
        return answer._replace(state=replace(tail.state, length=answer.state.length))


class OneTokenIgnoresItsGate(TextbookDelta):
    """The path for single tokens writes with full strength, whatever beta says."""

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        if self.stepping:
            gates = {n: torch.where(g == 0, g, torch.ones_like(g)) for n, g in gates.items()}
        return super().update(memory, key, value, gates)

    stepping = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.stepping = call.state is not None and key.shape[2] == 1
        return super().attend(query, key, value, call)


class OneTokenReadsFirst(TextbookDelta):
    """The path for single tokens reads before it writes: a token does not see itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(call.state, RecurrentState) or query.shape[2] != 1 or key.shape[2] != 1:
            return answer
        group = self.num_heads // self.num_kv_heads
        held = call.state.memory.repeat_interleave(group, dim=1)
        scale = float(self.key_dim**-0.5 if call.scale is None else call.scale)
        return answer._replace(out=(query.to(held.dtype) @ held * scale).to(query.dtype))


class TruncatesBackpropagation(TextbookDelta):
    """The memory is detached between calls: no gradient reaches earlier steps."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        return answer._replace(state=answer.state.detach())


@dataclass(kw_only=True, eq=False)
class _AnyWidth(RecurrentState):
    def check(self, subject: str, *rest: Any) -> None:
        self.memory = self.memory.to(torch.promote_types(self.memory.dtype, torch.float32))
        super().check(subject, *rest)


class MemoryInTheKeysDtype(TextbookDelta):
    """Between calls the memory is kept in the keys' dtype, bfloat16 included."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        kept = _AnyWidth(length=answer.state.length, memory=answer.state.memory.to(key.dtype))
        return answer._replace(state=kept)

    def init_state(self, *args: Any, **kwargs: Any) -> RecurrentState:
        made = super().init_state(*args, **kwargs)
        return _AnyWidth(memory=made.memory)


@dataclass(kw_only=True, eq=False)
class _AnyBatch(RecurrentState):
    def check(self, subject: str, *rest: Any) -> None:
        self.check_unspent(subject)


class BroadcastsOneSequence(TextbookDelta):
    """The memory of one sequence is broadcast over a batch without a word."""

    def init_state(self, *args: Any, **kwargs: Any) -> RecurrentState:
        made = super().init_state(*args, **kwargs)
        return _AnyBatch(memory=made.memory)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        return answer._replace(state=_AnyBatch(length=answer.state.length, memory=answer.state.memory))


class AbsorbsWithoutGates(TextbookDelta):
    """Tokens without queries are written with full strength."""

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        gates = {n: torch.ones_like(g) for n, g in (call.gates or {}).items()}
        return RecurrentAttention.absorb(self, key, value, Call(call.visibility, gates=gates, state=call.state))


MUTANTS = (
    Mutant(ForgetsTheNormaliser, "chunks_equal_the_whole", "the normaliser forgets the past"),
    Mutant(PaddingOfABlockCounts, "chunks_equal_the_whole", "padding of a block enters the sums"),
    Mutant(OneTokenIgnoresItsGate, "chunks_equal_the_whole", "single tokens ignore beta"),
    Mutant(OneTokenReadsFirst, "chunks_equal_the_whole", "single tokens do not see themselves"),
    Mutant(DropsTheLastBlock, "long_runs_split_anywhere", "the last block never enters the state"),
    Mutant(AddsThePastToEveryBlock, "long_runs_split_anywhere", "blocks of a chunk do not follow each other"),
    Mutant(TruncatesBackpropagation, "state_gradients_match_definition", "the memory is detached between calls"),
    Mutant(MemoryInTheKeysDtype, "states_keep_length_and_dtype", "a memory in the keys' dtype"),
    Mutant(BroadcastsOneSequence, "misfit_states_are_refused", "one sequence's memory serves a batch"),
    Mutant(AbsorbsWithoutGates, "queries_and_keys_may_come_apart", "keys without queries ignore their gates"),
)
