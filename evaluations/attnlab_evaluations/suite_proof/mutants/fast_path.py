"""Mutants that the checks in `checks/fast_path.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlab import AttentionOutput, ScoreAttention, State
from attnlab.engines import FastPath, FusedSoftmax
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


class _ForgetsCausality(FastPath):
    def function(self, variant: Any, causal: bool, contiguous: bool) -> Any:
        return scaled_dot_product_attention if variant.num_heads == variant.num_kv_heads else None


class ForgetsCausalityOnceValidated(TextbookAttention):
    fast_path = _ForgetsCausality()


class FastPathOfAnotherScore(TextbookAttention):
    """The score has a temperature, and the fast path is that of the plain dot product."""

    formula = ""
    fast_path = FusedSoftmax()

    def scores(self, q: Tensor, k: Tensor, call: Any) -> Tensor:
        return 3 * super().scores(q, k, call)


class _ForgetsTheMask(FastPath):
    def masked(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, visibility: Any) -> Tensor | None:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)


class ForgetsTheMaskOnceValidated(TextbookAttention):
    fast_path = _ForgetsTheMask()


class _ForgetsThePast(FastPath):
    def step(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
        following = state.append_step(key, value) if not torch.is_grad_enabled() else None  # type: ignore[attr-defined]
        if following is None:
            return None
        return AttentionOutput(
            value.repeat_interleave(variant.num_heads // variant.num_kv_heads, 1), None, None, following[2]
        )


class ForgetsThePastOnceValidated(ScoreAttention):
    formula = "softmax_dot_product"
    inner_product = True
    fast_path = _ForgetsThePast()


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ForgetsCausalityOnceValidated, "fast_path_equals_the_full_path", "the fast path ignores causal=True"),
    Mutant(FastPathOfAnotherScore, "fast_path_equals_the_full_path", "the fast path is that of another score"),
    Mutant(ForgetsTheMaskOnceValidated, "fast_path_equals_the_full_path", "the fast path ignores the mask"),
    Mutant(ForgetsThePastOnceValidated, "fast_steps_equal_full_steps", "a fast step reads its own token alone"),
)
