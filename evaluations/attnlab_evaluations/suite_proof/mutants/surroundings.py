"""Mutants that are right alone: beside another call, elsewhere, or under another setting they are not. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.state import CacheState, State
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, TextbookDelta, TextbookLinear

Shape = tuple[int, int, int, int]


# -- overlapping calls --------------------------------------------------------------------------------------------


class KeepsTheCallOnItself(TextbookAttention):
    """The mask is read from the module, where the call that came last left it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        self.call = call
        return super().attend(query, key, value, call)

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        return super().visible(self.call, shape, device)


class KeepsItsAnswerOnItself(TextbookDelta):
    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
        self.recalled = torch.einsum("bhde,bhd->bhe", memory, key)
        error = value - self.recalled
        written: Tensor = key.unsqueeze(-1) * (gates["beta"].unsqueeze(-1) * error).unsqueeze(-2)
        return memory + written


class SharesAScratchBuffer(TextbookLinear):
    """Features are written to a buffer that is kept for the next call of that shape."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scratch: dict[Any, Tensor] = {}

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().feature_map(x, role=role, positions=positions)
        kept = self.scratch.setdefault((role, x.shape, x.dtype), torch.empty_like(x))
        torch.add(torch.nn.functional.elu(x), 1, out=kept)
        return kept


class _SavedElsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, module: Any) -> Tensor:
        ctx.module = module
        module.saved = weights.detach(), value.detach()
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, value = ctx.module.saved
        return grad @ value.transpose(-1, -2), weights.transpose(-1, -2) @ grad, None


class SavesOnTheModule(TextbookAttention):
    """A backward right after its forward finds its own tensors; a second forward in between replaces them."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return weights @ v
        result: Tensor = _SavedElsewhere.apply(weights, v, self)  # type: ignore[no-untyped-call]
        return result


class _ScaledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        ctx.weights, ctx.value = weights.detach().clone(), value.detach()
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        by_value = ctx.weights.transpose(-1, -2) @ grad
        return torch.mul(grad @ ctx.value.transpose(-1, -2), 1.0, out=ctx.weights).clone(), by_value


class BackwardWritesToWhatItSaved(TextbookAttention):
    """The weights' memory is used again for their gradient: a second backward finds no weights."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        result: Tensor = _ScaledInPlace.apply(weights, v)  # type: ignore[no-untyped-call]
        return result


class CutsByTheNumberOfThreads(TextbookAttention):
    """Keys are shared out between threads in equal parts; what does not divide is left over."""

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        count = torch.get_num_threads()
        part = max(1, v.shape[-2] // count)
        parts = [weights[..., n * part : (n + 1) * part] @ v[..., n * part : (n + 1) * part, :] for n in range(count)]
        return torch.stack(parts).sum(0)


# -- devices ------------------------------------------------------------------------------------------------------


class TableOnlyInTheConstructor(TextbookAttention):
    """A derived table that no state_dict holds and no reset_parameters makes again."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        table = torch.full((self.num_heads, 1, 1), float(self.key_dim) ** -0.5)
        self.register_buffer("table", table, persistent=False)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        table = self.get_buffer("table").to(q.dtype)
        scored: Tensor = super().scores(q, k, call) * table * float(self.key_dim) ** 0.5
        return scored


class ReadsANumberInTheConstructor(TextbookDelta):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.gain = float(torch.linspace(0.5, 1.0, self.num_heads)[-1])

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Any) -> Tensor:
        return super().update(memory, key, value, gates) * self.gain


class ForgetsTheDevice(TextbookLinear):
    """Right wherever the default device is query's."""

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return super().feature_map(x, role=role, positions=positions) * torch.ones(x.shape[-1], dtype=x.dtype)


class ClaimsMeta(TextbookAttention):
    """A shortcut that looks whether anything is hidden."""

    capabilities = replace(TextbookAttention.capabilities, devices=frozenset({"cpu", "cuda", "meta"}))

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        if sinks is None and bool(visible.all()):
            return torch.softmax(s, dim=-1), torch.logsumexp(s, dim=-1)
        return super().normalised(s, visible, sinks)


# -- settings -----------------------------------------------------------------------------------------------------


class ScaleInTheDefaultDtype(TextbookAttention):
    def scale(self, call: Call) -> Any:
        return torch.tensor(super().scale(call))


class _Full(CacheState):
    pass


class UnusedSlotsAreMultipliedByZero(TextbookAttention):
    """A store of fixed size is attended whole: its unused slots have weight 0, whatever fresh memory holds."""

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        made = super().init_state(batch, None, *args, **kwargs)
        if capacity is None:
            return made
        heads, key, value = self.num_kv_heads, made.key, made.value
        return _Full(
            key=torch.empty(batch, heads, capacity, self.key_dim, dtype=key.dtype, device=key.device),
            value=torch.empty(batch, heads, capacity, self.value_dim, dtype=value.dtype, device=value.device),
        )

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        state, seen = call.state, call.visibility
        if not isinstance(state, _Full) or torch.is_grad_enabled():
            return super().remember(key, value, call)
        assert seen is not None
        stop = state.length + key.shape[2]
        state.key[:, :, state.length : stop], state.value[:, :, state.length : stop] = key, value
        return (state.key, state.value, replace(state, length=stop, spent=False, key_present=seen.key_present))

    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        if call.visibility is None or call.visibility.key_length == shape[3]:
            return super().visible(call, shape, device)
        used = (*shape[:3], call.visibility.key_length)
        unused = shape[3] - call.visibility.key_length
        return torch.nn.functional.pad(super().visible(call, used, device), (0, unused), value=False)


class IgnoresDeterministicMode(TextbookAttention):
    """Sums arrive in any order, as atomic additions do, also where determinism is demanded."""

    capabilities = replace(TextbookAttention.capabilities, deterministic=False)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        chance = torch.Generator()
        chance.seed()
        total = torch.zeros(*weights.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        for j in torch.randperm(weights.shape[-1], generator=chance).tolist():
            total = total + weights[..., j : j + 1] * v[..., j : j + 1, :]
        return total


class RepairsItsGradientInAHook(TextbookAttention):
    """A product in logarithms, whose slope at a weight of 0 is 0 times infinity; a hook turns the NaN into 0."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, visible, sinks)
        if weights.requires_grad:
            weights = weights * 1.0
            weights.register_hook(lambda gradient: gradient.nan_to_num())  # type: ignore[no-untyped-call]
        return torch.exp(torch.log(weights)), lse


class SeedsTheGenerator(TextbookLinear):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        torch.manual_seed(0)
        return super().attend(query, key, value, call)


class LowersThePrecision(TextbookDelta):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        torch.set_float32_matmul_precision("high")
        return super().attend(query, key, value, call)


MUTANTS = (
    Mutant(KeepsTheCallOnItself, "threads_share_an_instance", "the mask lies on the module"),
    Mutant(KeepsItsAnswerOnItself, "threads_share_an_instance", "a step's result lies on the module"),
    Mutant(SharesAScratchBuffer, "threads_share_an_instance", "a buffer is kept for every shape"),
    Mutant(SavesOnTheModule, "overlapping_calls_keep_their_own", "saved tensors lie on the module, not on ctx"),
    Mutant(BackwardWritesToWhatItSaved, "overlapping_calls_keep_their_own", "the backward reuses saved memory"),
    Mutant(CutsByTheNumberOfThreads, "the_number_of_threads_does_not_matter", "a remainder is left over"),
    Mutant(TableOnlyInTheConstructor, "made_on_meta_and_loaded", "a buffer that nothing makes again"),
    Mutant(ReadsANumberInTheConstructor, "made_on_meta_and_loaded", "float() of a tensor in __init__"),
    Mutant(ForgetsTheDevice, "tensors_are_made_where_query_is", "torch.ones without device="),
    Mutant(ClaimsMeta, "runs_on_meta", "a branch on a tensor's value"),
    Mutant(ScaleInTheDefaultDtype, "the_default_dtype_does_not_matter", "torch.tensor(scale) without dtype="),
    Mutant(UnusedSlotsAreMultipliedByZero, "deterministic_mode_is_honoured", "0 * what fresh memory holds"),
    Mutant(IgnoresDeterministicMode, "deterministic_mode_is_honoured", "neither honoured nor refused"),
    Mutant(RepairsItsGradientInAHook, "settings_change_nothing", "NaN in the backward, repaired afterwards"),
    Mutant(SeedsTheGenerator, "calls_leave_settings_alone", "torch.manual_seed in a forward"),
    Mutant(LowersThePrecision, "calls_leave_settings_alone", "a setting changed for good"),
)
