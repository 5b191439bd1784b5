"""Decoding with a state: full equals any chunking equals one by one, forward and gradient. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks._stepping import (
    ADVICE,
    NEEDS,
    feed,
    feedings,
    is_defined,
    seen_by_chunks,
    true_rows,
    truth,
)
from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import Bound, bound, largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import defined_gradients, direction_for, gradients, recorded, trained
from attnlab.conformance.oracle.features import FEATURES, compatible
from attnlab.conformance.oracle.inputs import Inputs, draw, plain_dtype, reduction_terms
from attnlab.conformance.running.check import Check, Scope

EVERY_WAY = (("causal",), ("causal", "key_mask_left"), ("causal", "segments"))
"""Cases that are fed in every way that there is."""


def check_chunks_equal_the_whole(variant: Any, case: Case) -> None:
    """Fed one by one, in chunks, at once or with empty chunks between, the outputs equal the definition's of the whole."""
    inputs = draw(case, variant)
    known: list[tuple[Tensor, tuple[Tensor, Bound, str]]] = []
    with torch.no_grad():
        for word, sizes, capacity in feedings(case.query_length, case.features in EVERY_WAY):
            visible = seen_by_chunks(inputs, sizes)
            answer = next((a for seen, a in known if torch.equal(seen, visible)), None)
            if answer is None:
                answer = truth(variant, inputs, visible)
                known.append((visible, answer))
            exact, limit, name = answer
            demand_close(
                feed(variant, inputs, sizes, capacity)[0],
                exact,
                limit,
                variant,
                case,
                what="out",
                versus=f"{name} (fed {word}, capacity {capacity})",
                advice=ADVICE,
            )


def check_long_runs_split_anywhere(variant: Any, case: Case) -> None:
    """Splits beside and on the sizes of usual blocks (64, 128, 512), and one by one past every growth of a store."""
    inputs = draw(case, variant)
    n = case.query_length
    rows = list(range(n)) if n <= 150 else sorted({r for b in (0, 64, 512, n // 2, n) for r in _beside(b, n)})
    known: dict[tuple[int, ...], tuple[Tensor, Bound, str]] = {}
    with torch.no_grad():
        for sizes in _long_splits(n, case.features == ("causal",)):
            ends = [n] * n if inputs.arguments.get("causal") else _ends(sizes)
            seen = tuple(ends[r] for r in rows)
            if seen not in known:
                known[seen] = true_rows(variant, inputs, rows, list(seen))
            exact, limit, name = known[seen]
            demand_close(
                feed(variant, inputs, sizes)[0][:, :, rows],
                exact,
                limit,
                variant,
                case,
                what="out",
                versus=f"{name} (rows {rows[0]} to {rows[-1]}, fed as {_told(sizes)})",
                rows=rows,
                advice="The last block of a chunk is rarely full: what a state holds must not depend on where blocks end",
            )


def check_state_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients through a chunked run equal the definition's gradients of the whole."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)
    exact = true_gradients(variant, inputs, direction)
    weights = trained(variant)
    n = case.query_length
    for sizes, capacity in (([2, 1, 0, n - 3], None), ([1] * n, n))[: 2 if case.features in EVERY_WAY else 1]:
        leaves = recorded(inputs.tensors())
        with torch.enable_grad():
            out, _ = feed(variant, inputs.rebuilt(leaves), sizes, capacity)
            found = torch.autograd.grad(
                out, [*leaves.values(), *weights.values()], direction, allow_unused=True, materialize_grads=True
            )
        for name, got in zip([*leaves, *weights], found, strict=True):
            demand_close(
                got,
                exact[name][0],
                exact[name][1],
                variant,
                case,
                what=f"gradient of {name}",
                versus=f"the gradient of the whole (fed as {_told(sizes)}, capacity {capacity})",
                advice="While autograd records, append by concatenation: nothing detached, nothing written over",
            )


def true_gradients(variant: Any, inputs: Inputs, direction: Tensor) -> dict[str, tuple[Tensor, Bound]]:
    """Gradients by input and parameter: the definition's, or the variant's own without a state, and their bounds."""
    case = inputs.case
    size = largest(direction) * largest(inputs.value)
    terms = reduction_terms(case)
    if not is_defined(variant, inputs):
        _, own = gradients(variant, inputs, direction)
        return {
            n: (g, rounding_bound(case.dtype, terms=terms * case.batch, magnitude=max(size, largest(g))))
            for n, g in own.items()
        }
    visible = inputs.visible()
    low = plain_dtype(case.dtype)
    exact = defined_gradients(variant, inputs, direction, visible=visible)
    plain = defined_gradients(variant, inputs, direction, getattr(torch, low), visible=visible)
    return {
        n: (
            g,
            bound(
                case.dtype,
                exact=g,
                plain=plain[n],
                plain_dtype=low,
                terms=terms * (case.batch if g.dim() < 4 else 1),  # others are sums over the batch too
                magnitude=size,
            ),
        )
        for n, g in exact.items()
    }


def _beside(border: int, n: int) -> Iterator[int]:
    yield from (r for r in range(border - 3, border + 4) if 0 <= r < n)


def _long_splits(n: int, stepwise: bool) -> Iterator[list[int]]:
    """Chunks that end before, on and after the ends of blocks of 64, 128 and 512, and blocks filled by several chunks."""
    if n > 512:
        yield [511, 1, 1, n - 513]
        yield [513, n - 513]
        return
    if stepwise:
        yield [1] * n
        yield [n - 1, 1]
    yield [63, 1, 1, n - 65]
    yield [65, n - 65]
    yield [64] * (n // 64) + [n % 64]
    yield [128, n - 128]


def _ends(sizes: list[int]) -> list[int]:
    ends: list[int] = []
    for size in sizes:
        ends += [len(ends) + size] * size
    return ends


def _told(sizes: list[int]) -> str:
    return f"{len(sizes)} tokens one by one" if set(sizes) == {1} else "+".join(map(str, sizes))


ODD = (
    {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "key_dim": 1, "value_dim": 1},
    {"batch": 3, "num_heads": 5, "num_kv_heads": 5, "head_dim": 3, "key_dim": 3, "value_dim": 3},
)
TOGETHER = (
    ("left_window", "key_mask_holes", "gqa"),
    ("key_mask_left", "score_mod"),
    ("left_window", "mask_mod"),
    ("segments", "left_window", "gqa"),
    ("segments", "score_mod"),
    ("segments", "mask_mod"),
    ("key_mask_left", "mask", "bias"),
    ("left_window", "sinks"),
    ("softcap", "gqa", "value_dim"),
    ("key_mask_left", "gqa", "value_dim"),
    ("key_mask_holes", "query_lengths"),
)


UNORDERED = ("window", "key_mask_holes", "segments", "mask_of_each", "mask_mod", "bias", "score_mod", "gqa")
"""What is fed without causal too: there a query sees its whole chunk."""
QUICK = (
    "key_mask_left",
    "key_mask_holes",
    "segments",
    "left_window",
    "value_dim",
    "query_dim",
    "bias_of_each",
    "mask_of_each",
    "mask_mod",
    "score_mod",
    "sinks",
    "softcap",
    "scale",
)


def _whole(scope: Scope) -> Iterable[Case]:
    """Every way to ask that leaves lengths alone; offsets have a check of their own."""
    labels = [
        label
        for label, f in FEATURES.items()
        if "offset" not in f.sets and not {"query_length", "key_length"} & set(f.sizes) and compatible("causal", label)
    ]
    yield case("causal", needs=NEEDS, dtype=scope.base)
    for label in QUICK if scope.quick else labels:
        yield case("causal", label, needs=NEEDS, dtype=scope.base)
    for dtype in scope.dtypes:
        yield case("causal", "key_mask_left", "gqa", needs=NEEDS, dtype=dtype)
        if not scope.quick:
            yield case("causal", needs=NEEDS, dtype=dtype)
    yield case("key_mask_left", needs=("state",), dtype=scope.base)
    if scope.quick:
        return
    yield from (case("causal", *many, needs=NEEDS, dtype=scope.base) for many in TOGETHER)
    yield from (case("causal", needs=NEEDS, dtype=scope.base, note="odd", **sizes) for sizes in ODD)
    yield case(needs=("state",), dtype=scope.base)
    yield from (case(x, needs=("state",), dtype=scope.base) for x in UNORDERED)


def _long(scope: Scope) -> Iterable[Case]:
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "dtype": scope.base}

    def sized(n: int) -> dict[str, Any]:
        return {**sizes, "query_length": n, "key_length": n}

    yield case("causal", needs=NEEDS, **sized(140))
    if not scope.quick:
        yield case("causal", "key_mask_holes", needs=NEEDS, **sized(140))
        yield case("causal", "left_window", needs=NEEDS, **sized(140))
        yield case("causal", *declared(scope, "bias", "sinks", "mask_mod"), needs=NEEDS, **sized(140))
        yield case(needs=("state",), **sized(140))
        yield case("causal", needs=NEEDS, **sized(530))


def _gradient(scope: Scope) -> Iterable[Case]:
    needs = (*NEEDS, "backward")
    few = ((), ("gqa",), ("key_mask_left",), ("bias",))
    many = (
        ("key_mask_holes",),
        ("value_dim",),
        ("query_dim",),
        ("scale",),
        ("left_window",),
        ("segments",),
        ("mask_of_each",),
        ("mask_mod",),
        ("score_mod",),
        ("softcap",),
        ("sinks",),
        ("hiding_bias",),
    )
    for labels in few if scope.quick else (*few, *many):
        yield case("causal", *labels, needs=needs, dtype=scope.base)
    if not scope.quick:
        yield from (case("causal", needs=needs, dtype=d) for d in scope.dtypes if d != scope.base)


CHECKS = (
    Check(check_chunks_equal_the_whole, "state", _whole),
    Check(check_long_runs_split_anywhere, "state", _long),
    Check(check_state_gradients_match_definition, "state", _gradient),
)
