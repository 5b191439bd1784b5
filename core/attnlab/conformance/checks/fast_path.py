"""Repeated calls, which skip validation and may take a variant's own fast path. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.interface import Attention
from attnlab.visibility import AttentionMask

_ADVICE = (
    "A fast path serves calls that were validated before, with no argument but `causal`, a mask with a cache or a state: it must "
    "compute what `attend` computes for them. Return None from the method of `fast_path` that does not, or leave fast_path out"
)


def check_fast_path_equals_the_full_path(variant: Any, case: Case) -> None:
    """A call like one that was validated before returns what it returns when all stages run, bare, causal and under a mask."""
    inputs, compare = drawn(case, variant)
    full = _without_fast_path(variant)
    causal = bool(inputs.arguments.get("causal"))
    tensors = (inputs.query, inputs.key, inputs.value)
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    for recorded in (True, False):
        for layout, laid in (("contiguous", tensors), ("strided", strided)):
            with torch.set_grad_enabled(recorded):
                _compare(compare, variant, full, laid, f"{layout} tensors", causal=causal)
                if not causal and variant.capabilities.key_mask:
                    _compare(
                        compare,
                        variant,
                        full,
                        laid,
                        f"{layout} tensors and a mask",
                        mask=_padding(inputs.query, inputs.key),
                    )


def check_fast_steps_equal_full_steps(variant: Any, case: Case) -> None:
    """Decoding token by token returns what it returns when all stages run at every step."""
    inputs, compare = drawn(case, variant)
    full = _without_fast_path(variant)
    options = {"dtype": inputs.key.dtype, "device": inputs.key.device}
    states = [one.init_state(case.batch, **options) for one in (variant, full)]
    for t in range(case.key_length):
        token = [x[:, :, t : t + 1] for x in (inputs.query, inputs.key, inputs.value)]
        full._validated.clear()
        with torch.no_grad():
            fast, slow = (one(*token, causal=True, state=s) for one, s in zip((variant, full), states, strict=True))
        compare.same(fast.out, slow.out, f"step {t} through all stages", _ADVICE)
        states = [fast.state, slow.state]


def _compare(compare: Comparer, variant: Any, full: Any, tensors: Any, words: str, **arguments: Any) -> None:
    full._validated.clear()
    expected = full(*tensors, **arguments).out
    for number in range(1, 4):  # the first validates, the others may be fast
        compare.same(
            variant(*tensors, **arguments).out, expected, f"call {number} with {words} through all stages", _ADVICE
        )


def _without_fast_path(variant: Any) -> Any:
    """The same parameters behind all stages. Without declared gradients no call is fast."""
    if not isinstance(variant, Attention) or not variant.capabilities.backward:
        raise NotApplicable("its calls always take all stages")
    full = copy.copy(variant)
    full._fast_path = None
    return full


def _padding(query: Tensor, key: Tensor) -> AttentionMask:
    """A mask with a cache that hides the last key of each item but the first, and its dense form."""
    present = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    present[1:, -1] = False
    dense = present[:, None, None, :].expand(-1, 1, query.shape[2], -1)
    return AttentionMask(key_mask=present).with_cache(dense=dense)


def _calls(scope: Scope) -> Iterable[Case]:
    if not scope.has_gates:
        yield from scope.usable("", "causal", "gqa", "causal+gqa", batch=2, query_length=6, key_length=6)


def _steps(scope: Scope) -> Iterable[Case]:
    if scope.capabilities.state and scope.capabilities.causal and not scope.has_gates:
        yield from scope.usable("", "gqa", batch=2, query_length=6, key_length=6)


CHECKS = (
    Check(check_fast_path_equals_the_full_path, "repetition", _calls),
    Check(check_fast_steps_equal_full_steps, "repetition", _steps),
)
