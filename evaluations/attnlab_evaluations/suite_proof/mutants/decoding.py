"""Mutants that the checks in `checks/decoding.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, CacheState, Call, LinearState, RecurrentState, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookChunkedDelta


class MemoryKeepsItsDecay(TextbookChunkedDelta):
    """A chunk reads the memory faded, and hands it on as it was."""

    def chunk(
        self, memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        out, following = super().chunk(memory, query, key, value, beta, decay)
        return out, following + memory * (1 - decay.sum(-1).exp())[..., None, None]


class ForgetsThePadding(TextbookAttention):
    """Keys that were absent in an earlier step come back."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        return keys, values, replace(state, key_present=None)


class CausalWithinTheChunk(TextbookAttention):
    """A step of several tokens is aligned top-left: it sees the oldest keys instead of its own past."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible = super().visible(call, shape, device)
        if call.state is None or not call.state.length:
            return visible
        return visible & torch.ones(shape, dtype=torch.bool, device=device).tril(0 if shape[2] > 1 else shape[3])


class DetachesThePast(TextbookAttention):
    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        past = replace(call.state, key=call.state.key.detach(), value=call.state.value.detach())
        stepped = Call(visibility=call.visibility, state=past)
        return super().remember(key, value, stepped)


class HalfPrecisionPast(TextbookDelta):
    """The memory is kept in bfloat16 between calls."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        if not isinstance(answer.state, RecurrentState):
            return answer
        memory = answer.state.memory
        return answer._replace(state=replace(answer.state, memory=memory.to(torch.bfloat16).to(memory.dtype)))


class CapacityIsAttended(TextbookAttention):
    """Unused slots of a preallocated store take part as zeros."""

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(batch, None, *args, **kwargs)
        self.room = capacity or 0
        return made

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        unused = getattr(self, "room", 0) - s.shape[-1]
        if unused <= 0 or sinks is not None:
            return super().normalised(s, visible, sinks)
        zeros = torch.full((s.shape[1],), float(torch.tensor(unused).log()), dtype=s.dtype, device=s.device)
        return super().normalised(s, visible, zeros)


class CountsFromTheChunk(TextbookAttention):
    """What a score_mod sees as query and key positions starts again with every step."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        if call.score_mod is None or call.state is None or call.visibility is None:
            return super().modified(s, call)
        b, h, q, k = call.visibility.indices(0, s.shape[2], 0, s.shape[3])
        past = call.state.length
        return call.score_mod(s, b, h, q - past, k - past).to(s.dtype)


class CountsThePastTwice(TextbookAttention):
    """Positions of new queries advance by the prompt again: 6, 12, ... for a prompt of 6."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if call.state is None or visibility is None or visibility.left is None:
            return super().visible(call, shape, device)
        q = torch.arange(shape[2], device=device)[:, None] + 2 * call.state.length
        k = torch.arange(shape[3], device=device)
        present = True if visibility.key_present is None else visibility.key_present[:, None, None, :]
        return ((k <= q) & (k >= q - visibility.left) & present).expand(shape)


class EvictsOneTooMany(TextbookAttention):
    """A rolling store for windows drops the last key that the window still shows."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible, observed = super().visible(call, shape, device), call.visibility
        if call.state is None or observed is None or observed.left is None:
            return visible
        oldest = shape[3] - shape[2] - observed.left
        return visible & (torch.arange(shape[3], device=device) > oldest)


class MasksOnlyTheNewKeys(TextbookAttention):
    """A bias over past and new is added to the last keys only, as if the past had none."""

    def adjusted(self, s: Tensor, call: Call, scale: float) -> Tensor:
        if call.state is None or call.bias is None:
            return super().adjusted(s, call, scale)
        new = torch.arange(s.shape[3], device=s.device) >= call.state.length
        return self.modified(self.capped(s, call), call) + torch.where(new, call.bias.to(s.dtype), 0)


@dataclass(kw_only=True, eq=False)
class _ForgetsWhenIdle(CacheState):
    def renewed(self) -> _ForgetsWhenIdle:
        return replace(self, spent=False, key_present=None)


class AnEmptyStepLosesThePadding(TextbookAttention):
    """A step without tokens hands on a state that knows of no absent keys."""

    def init_state(self, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(*args, **kwargs)
        return _ForgetsWhenIdle(key=made.key, value=made.value)


class GrowsOneShort(TextbookAttention):
    """A store that doubles when it is full leaves the last token behind."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        keys, values, state = super().remember(key, value, call)
        past = state.length - key.shape[2]
        if past and past & (past - 1) == 0 and past >= 16:
            keys, values = keys.clone(), values.clone()
            keys[:, :, past - 1], values[:, :, past - 1] = 0, 0
        return keys, values, state


class GradientsStopAtTheStore(TextbookAttention):
    """New tokens are written into a store under no_grad, also while autograd records."""

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        with torch.no_grad():
            return super().remember(key, value, call)


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


class WeightsOfTheStep(TextbookAttention):
    """Weights have columns for the new keys only."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if answer.weights is None or call.state is None:
            return answer
        return answer._replace(weights=answer.weights[..., call.state.length :])


class LseOfTheStep(TextbookAttention):
    """lse sums over the new keys only."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        new = s.shape[-2]
        return weights, super().normalised(s[..., -new:], visible[..., -new:], sinks)[1] if self.stepping else lse

    stepping = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.stepping = call.state is not None
        return super().attend(query, key, value, call)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        MemoryKeepsItsDecay, "chunked_decoding_equals_full_attention", "the memory does not fade from chunk to chunk"
    ),
    Mutant(ForgetsThePadding, "chunked_decoding_equals_full_attention", "padding of earlier steps is lost"),
    Mutant(CausalWithinTheChunk, "chunked_decoding_equals_full_attention", "a step is aligned top-left"),
    Mutant(CapacityIsAttended, "chunked_decoding_equals_full_attention", "zeros of a static store take weight"),
    Mutant(CountsFromTheChunk, "chunked_decoding_equals_full_attention", "score_mod positions restart with each step"),
    Mutant(CountsThePastTwice, "chunked_decoding_equals_full_attention", "positions advance by the past twice"),
    Mutant(EvictsOneTooMany, "chunked_decoding_equals_full_attention", "a rolling store is one key too short"),
    Mutant(MasksOnlyTheNewKeys, "chunked_decoding_equals_full_attention", "a bias reaches only the new keys"),
    Mutant(
        AnEmptyStepLosesThePadding,
        "chunked_decoding_equals_full_attention",
        "a step without tokens forgets the padding",
    ),
    Mutant(GrowsOneShort, "chunked_decoding_equals_full_attention", "a store that grows loses a token"),
    Mutant(HalfPrecisionPast, "chunked_decoding_equals_full_attention", "a recurrence's memory in half precision"),
    Mutant(DetachesThePast, "state_gradients_match_definition", "no gradient reaches earlier steps"),
    Mutant(GradientsStopAtTheStore, "state_gradients_match_definition", "keys are stored without a graph"),
    Mutant(ForgetsTheNormaliser, "chunked_decoding_equals_full_attention", "the normaliser forgets the past"),
    Mutant(PaddingOfABlockCounts, "chunked_decoding_equals_full_attention", "padding of a block enters the sums"),
    Mutant(OneTokenIgnoresItsGate, "chunked_decoding_equals_full_attention", "single tokens ignore beta"),
    Mutant(OneTokenReadsFirst, "chunked_decoding_equals_full_attention", "single tokens do not see themselves"),
    Mutant(DropsTheLastBlock, "chunked_decoding_equals_full_attention", "the last block never enters the state"),
    Mutant(
        AddsThePastToEveryBlock, "chunked_decoding_equals_full_attention", "blocks of a chunk do not follow each other"
    ),
    Mutant(TruncatesBackpropagation, "state_gradients_match_definition", "the memory is detached between calls"),
    Mutant(WeightsOfTheStep, "chunked_decoding_equals_full_attention", "weights leave out the past"),
    Mutant(LseOfTheStep, "chunked_decoding_equals_full_attention", "lse leaves out the past"),
)
