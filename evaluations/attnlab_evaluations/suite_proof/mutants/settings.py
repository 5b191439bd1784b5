"""Mutants that the checks in `checks/settings.py` must fail. Needs torch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, CacheState, Call, State
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear

Shape = tuple[int, int, int, int]


class SeedsPython(TextbookAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        random.seed(0)
        return super().attend(query, key, value, call)


class SeedsWhenItIsMade(TextbookAttention):
    def __init__(self, **sizes: Any) -> None:
        torch.manual_seed(0)
        super().__init__(**sizes)


class SetsThePrecisionWhenItIsMade(TextbookAttention):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        torch.set_float32_matmul_precision("high")


class LeavesGradientsOnAfterAFault(TextbookAttention):
    """A mode is set around the scores and put back, though not where they fail."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        result = super().modified(s, call)
        torch.set_grad_enabled(was)
        return result if was else result.detach()


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
        state, visible = call.state, call.visibility
        if not isinstance(state, _Full) or torch.is_grad_enabled():
            return super().remember(key, value, call)
        assert visible is not None
        stop = state.length + key.shape[2]
        state.key[:, :, state.length : stop], state.value[:, :, state.length : stop] = key, value
        return (state.key, state.value, replace(state, length=stop, spent=False, key_present=visible.key_present))

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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(SeedsPython, "calls_do_not_change_global_settings", "random.seed() in a forward"),
    Mutant(SeedsWhenItIsMade, "calls_do_not_change_global_settings", "torch.manual_seed() in a constructor"),
    Mutant(SetsThePrecisionWhenItIsMade, "calls_do_not_change_global_settings", "a setting changed by a constructor"),
    Mutant(
        LeavesGradientsOnAfterAFault, "calls_do_not_change_global_settings", "a mode that is not put back after a fault"
    ),
    Mutant(ScaleInTheDefaultDtype, "default_dtype_does_not_matter", "torch.tensor(scale) without dtype="),
    Mutant(UnusedSlotsAreMultipliedByZero, "deterministic_mode_is_honoured", "0 * what fresh memory holds"),
    Mutant(IgnoresDeterministicMode, "deterministic_mode_is_honoured", "neither honoured nor refused"),
    Mutant(
        RepairsItsGradientInAHook,
        "anomaly_mode_and_matmul_precision_do_not_matter",
        "NaN in the backward, repaired afterwards",
    ),
    Mutant(SeedsTheGenerator, "calls_do_not_change_global_settings", "torch.manual_seed in a forward"),
    Mutant(LowersThePrecision, "calls_do_not_change_global_settings", "a setting changed for good"),
)
