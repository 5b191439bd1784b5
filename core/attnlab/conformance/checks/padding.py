"""Padding may hold anything, and a query that sees no key (a dead row) gives 0 and receives no gradient. Needs torch.

Padded are keys out of `key_mask`, `key_lengths` or segments, and queries past `query_lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks.masks import visible_with_bias
from attnlab.conformance.compare.comparer import Comparer
from attnlab.conformance.oracle import visibility
from attnlab.conformance.oracle.cases import Case, each
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, NotApplicable, Scope, hiding

CONTENTS = (float("nan"), float("inf"), 1e30)
ADVICE = (
    "Padding may hold anything: clear it (Attention.forward does) and zero them again after a feature map, "
    "in the normaliser and in the state as well"
)
DEAD_ADVICE = (
    "Neutralise such rows before normalising (a zero normaliser becomes 1, no maximum becomes 0) rather than "
    "repairing NaN afterwards: 0 * NaN in the backward undoes a repair"
)


def check_dead_rows_are_zero(variant: Any, case: Case) -> None:
    """A query that sees no key: out and weights 0, lse -inf."""
    inputs, dead = _with_dead_rows(variant, case)
    compare = Comparer(variant, inputs)
    features = _extra_outputs(variant)
    why = "the query sees no key"
    for answer in [inputs.answer(variant, **more) for more in ({}, features)]:
        compare.finite(answer.out, "out", "rows that see nothing are 0, never NaN", DEAD_ADVICE)
        for what in ("out", "weights"):
            if getattr(answer, what) is not None:
                rows = torch.where(dead[..., None], getattr(answer, what), 0)
                compare.zero(rows, f"a dead row's {what}", why, DEAD_ADVICE)
        if answer.lse is not None:
            lowest = answer.lse[dead]
            fault = f"lse of a row that sees no key must be -inf, got {float(lowest.flatten()[0])}"
            compare.demand(bool((lowest == -torch.inf).all()), fault, "The logarithm of an empty sum is -inf")


def check_dead_rows_receive_no_gradient(variant: Any, case: Case) -> None:
    """Gradients are finite everywhere, and exactly 0 for a query that sees no key."""
    inputs, dead = _with_dead_rows(variant, case)
    compare = Comparer(variant, inputs)
    _, grads = gradients(variant, inputs, direction_for(inputs))
    for name, gradient in grads.items():
        compare.finite(gradient, f"gradient of {name}", "some queries see no key", DEAD_ADVICE)
    own = torch.where(dead[..., None], grads["query"], 0)
    compare.zero(own, "gradient of a dead row's query", "it sees no key", DEAD_ADVICE)


def _extra_outputs(variant: Any) -> dict[str, bool]:
    """Weights and lse, as far as they are declared."""
    have = variant.capabilities
    return {"need_weights": bool(have.weights), "need_lse": bool(have.lse)}


def _with_dead_rows(variant: Any, case: Case) -> tuple[Inputs, Tensor]:
    inputs = draw(case, variant)
    dead = ~visible_with_bias(inputs).any(dim=-1)  # [B, H, Lq]
    if not bool(dead.any()):
        raise NotApplicable("every query sees a key here")
    return inputs, dead


def check_padding_does_not_affect_outputs(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in padding change neither out nor, where declared, weights and lse."""
    inputs = draw(case, variant)
    compare, features = Comparer(variant, inputs), _extra_outputs(variant)
    clean = filled(inputs, 0.0).answer(variant, **features)
    for content in CONTENTS:
        dirty = filled(inputs, content).answer(variant, **features)
        for what in ("out", "weights", "lse"):
            if getattr(clean, what) is not None:
                versus = f"the same call with 0 instead of {content} in padding"
                compare.same(getattr(dirty, what), getattr(clean, what), versus, ADVICE, what)


def check_padding_receives_no_gradient(variant: Any, case: Case) -> None:
    """NaN, Inf and 1e30 in padding change no gradient, and their own gradient is exactly 0."""
    inputs = draw(case, variant)
    compare, direction = Comparer(variant, inputs), direction_for(inputs)
    _, clean = gradients(variant, filled(inputs, 0.0), direction)
    padded_query, padded_key = padded(inputs)
    for content in CONTENTS:
        _, dirty = gradients(variant, filled(inputs, content), direction)
        compare.same_gradients(dirty, clean, f"the same call with 0 instead of {content} in padding", ADVICE)
        for name, slots in (("query", padded_query), ("key", padded_key), ("value", padded_key)):
            own = dirty[name].transpose(1, 2)[slots]  # [n, H, D]
            compare.zero(own, f"gradient of a padded {name} slot", f"it holds {content} and takes no part", ADVICE)


def padded(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Padded queries `[B, Lq]` and padded keys `[B, Lk]`, from the scalar predicate."""
    rules = inputs.rules()
    queries = [[not visibility.query_present(b, i, rules) for i in range(rules.queries)] for b in range(rules.batch)]
    keys = [[not visibility.key_present(b, j, rules) for j in range(rules.keys)] for b in range(rules.batch)]
    device = inputs.query.device
    return torch.tensor(queries, device=device), torch.tensor(keys, device=device)


def filled(inputs: Inputs, content: float) -> Inputs:
    """The call with `content` in the padding of query, key, value and gates."""
    padded_query, padded_key = padded(inputs)
    limit = torch.finfo(inputs.query.dtype).max
    content = min(content, limit) if content < float("inf") else content
    q, k = padded_query[:, None, :, None], padded_key[:, None, :, None]

    def fill(name: str, x: Tensor) -> Tensor:
        if name in ("query", "key", "value"):
            return x.masked_fill(q if name == "query" else k, content)
        return x.masked_fill(k if x.dim() == 4 else k[..., 0], content) if name.startswith("gates.") else x

    return inputs.rebuilt({n: fill(n, x) for n, x in inputs.tensors().items()})


def _dead(scope: Scope) -> Iterable[Case]:
    """Requests that hide, and the masks in each dtype of which some hide whole rows, items and heads."""
    axes = ("keys", "mask", "segments", "query_lengths", "bias", "offset")
    yield from scope.requests(without=("contents", "layout"), change=hiding(*axes), full=60, quick=8, seed=9000)
    labels = (
        "mask",
        "mask_per_item",
        "mask_per_head",
        "mask_of_each",
        "hiding_bias",
        "key_lengths=ends",
        "key_mask_empty",
    )
    for dtype in scope.dtypes:
        yield from each(*labels, "causal+key_mask_empty", "query_lengths", "negative_offset", dtype=dtype)


def _padded(scope: Scope) -> Iterable[Case]:
    change, without = hiding("keys", "segments", "query_lengths"), ("contents", "layout")
    yield from scope.requests(without=without, change=change, full=50, quick=10, seed=10000)
    for dtype in scope.other_dtypes:
        yield from each("key_mask_holes", "causal+key_mask_left", dtype=dtype)


def _backward(cases: Callable[[Scope], Iterable[Case]]) -> Callable[[Scope], Iterable[Case]]:
    return lambda scope: [replace(c, needs=(*c.needs, "backward")) for c in cases(scope)]


CHECKS = (
    Check(check_dead_rows_are_zero, "dead rows", _dead, asks_more=True, random_too=True),
    Check(check_dead_rows_receive_no_gradient, "dead rows", _backward(_dead), random_too=True),
    Check(check_padding_does_not_affect_outputs, "padding", _padded, asks_more=True, random_too=True),
    Check(check_padding_receives_no_gradient, "padding", _backward(_padded), random_too=True),
)
