"""Mutants that the checks in `checks/devices.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookDelta, TextbookLinear


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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(TableOnlyInTheConstructor, "meta_initialisation_and_loading", "a buffer that nothing makes again"),
    Mutant(ReadsANumberInTheConstructor, "meta_initialisation_and_loading", "float() of a tensor in __init__"),
    Mutant(ForgetsTheDevice, "tensors_are_created_on_the_device_of_query", "torch.ones without device="),
    Mutant(ClaimsMeta, "runs_on_meta", "a branch on a tensor's value"),
)
