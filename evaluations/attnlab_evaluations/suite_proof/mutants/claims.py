"""Mutants that claim a property they do not have. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.call import Call
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention


class ClaimsIsolation(TextbookAttention):
    """0 * NaN in the product with value."""

    capabilities = replace(TextbookAttention.capabilities, isolates_nonfinite=True)


class ClaimsLinearMemory(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, linear_memory=True)


class ClaimsDeterminism(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        order = torch.randperm(weights.shape[-1], device=v.device)  # as atomic additions arrive in any order
        total = torch.zeros(*weights.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
        for j in order.tolist():
            total = total + weights[..., j : j + 1] * v[..., j : j + 1, :]
        return total


class ClaimsBatchInvariance(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, batch_invariant=True)

    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if weights.shape[0] == 1:
            return super().mixed(weights, v, visible)
        return super().mixed(weights.flip(-1), v.flip(-2), visible)


class ClaimsToCompile(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, compiles=True)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if float(q.abs().max()) == 0.0:
            return q.new_zeros(*q.shape[:3], k.shape[2])
        return super().scores(q, k, call)


class ClaimsMoreThanItsClass(TextbookAttention):
    capabilities = TextbookAttention.capabilities.narrow(window="not yet")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.capabilities = TextbookAttention.capabilities
        self._bits = self.capabilities.bits


MUTANTS = (
    Mutant(ClaimsIsolation, "hidden_nonfinite_pairs_are_isolated", "0 * NaN"),
    Mutant(ClaimsLinearMemory, "largest_intermediate_grows_linearly", "all pairs at once"),
    Mutant(ClaimsDeterminism, "repetition_gives_the_same_bits", "sums in any order"),
    Mutant(ClaimsBatchInvariance, "batch_items_are_bitwise_independent", "another reduction order for one item"),
    Mutant(ClaimsToCompile, "compiles_without_a_graph_break", "a branch on a tensor's value"),
    Mutant(ClaimsMoreThanItsClass, "claims_are_consistent", "an instance widens what its class declares"),
)
