"""Decoding with a state: full equals any chunking equals one by one, forward and gradient. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import (
    ADVICE,
    NEEDS,
    ends_of,
    feed,
    feedings,
    is_defined,
    step,
    steps,
    truth,
    up_to,
    visible_by_chunks,
)
from attnlab.conformance.compare.comparer import Comparer, drawn, short
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.bounds import exact_gradients_and_bounds
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, gradients, recorded, slopes, trained
from attnlab.conformance.oracle.features import FEATURES, compatible
from attnlab.conformance.oracle.inputs import Inputs, gradient_terms
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import UnsupportedRequest

EVERY_WAY = (("causal",), ("causal", "key_mask_left"), ("causal", "segments"))
"""Cases that are fed in every way that there is."""


def check_chunked_decoding_equals_full_attention(variant: Any, case: Case) -> None:
    """Fed one by one, in chunks, at once or with empty chunks between, the outputs equal the definition's of the whole."""
    inputs, compare = drawn(case, variant)
    known: list[tuple[Tensor, tuple[Tensor, Bound, str]]] = []
    for words, sizes, capacity in feedings(case.query_length, case.features in EVERY_WAY):
        visible = visible_by_chunks(inputs, sizes)
        answer = next((a for other, a in known if torch.equal(other, visible)), None)
        if answer is None:
            answer = truth(variant, inputs, visible)
            known.append((visible, answer))
        exact, limit, name = answer
        with torch.no_grad():
            got, _ = feed(variant, inputs, sizes, capacity)
        compare.close(got, exact, limit, f"{name} (fed {words}, capacity {capacity})", ADVICE)


def check_long_sequences_may_be_split_anywhere(variant: Any, case: Case) -> None:
    """Splits beside and on the sizes of usual blocks (64, 128, 512), and one by one past every growth of a store."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    borders = {r for b in (0, 64, 512, n // 2, n) for r in range(b - 3, b + 4) if 0 <= r < n}
    rows = list(range(n)) if n <= 150 else sorted(borders)
    known: dict[tuple[int, ...], tuple[Tensor, Bound, str]] = {}
    for sizes in _long_splits(n, case.features == ("causal",)):
        every = [n] * n if inputs.arguments.get("causal") else ends_of(sizes)
        ends = tuple(every[r] for r in rows)
        if ends not in known:
            visible = up_to(inputs.visible(rows), torch.tensor(ends, device=inputs.query.device))
            known[ends] = truth(variant, inputs, visible, rows=rows)
        exact, limit, name = known[ends]
        with torch.no_grad():
            got = feed(variant, inputs, sizes)[0][:, :, rows]
        versus = f"{name} (rows {rows[0]} to {rows[-1]}, fed as {_listed(sizes)})"
        advice = "The last block of a chunk is rarely full: what a state holds must not depend on where blocks end"
        compare.close(got, exact, limit, versus, advice, rows=rows)


def check_state_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients through a chunked run equal the definition's gradients of the whole."""
    inputs, compare = drawn(case, variant)
    exact = _true_gradients(variant, inputs)
    n = case.query_length
    for sizes, capacity in (([2, 1, 0, n - 3], None), ([1] * n, n))[: 2 if case.features in EVERY_WAY else 1]:
        got = _slopes(variant, inputs, lambda x: feed(variant, x, sizes, capacity)[0], trained(variant))  # noqa: B023
        versus = f"the gradient of the whole (fed as {_listed(sizes)}, capacity {capacity})"
        advice = "While autograd records, append by concatenation: nothing detached, nothing written over"
        compare.close_gradients(got, exact, advice, versus)


def _slopes(variant: Any, inputs: Inputs, run: Any, more: dict[str, Tensor]) -> Gradients:
    """Gradients of `run(inputs)` by input, and by the leaves in `more`."""
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        return slopes(run(inputs.rebuilt(leaves)), {**leaves, **more}, direction_for(inputs))


def chunked_gradients(variant: Any, inputs: Inputs, sizes: Sequence[int]) -> Gradients:
    """Gradients by input of a run in chunks of these sizes."""
    return _slopes(variant, inputs, lambda x: feed(variant, x, sizes)[0], {})


def _true_gradients(variant: Any, inputs: Inputs) -> dict[str, tuple[Tensor, Bound]]:
    """Gradients by input and parameter: the definition's, or the variant's own without a state, and their bounds."""
    case, direction = inputs.case, direction_for(inputs)
    if is_defined(variant, inputs):
        return exact_gradients_and_bounds(variant, inputs, direction)
    size = largest(direction) * largest(inputs.value)

    def limit(name: str, gradient: Tensor) -> Bound:
        terms = gradient_terms(case, gradient)
        return rounding_bound(case.dtype, terms=terms, magnitude=max(size, largest(gradient)))

    return {n: (g, limit(n, g)) for n, g in gradients(variant, inputs, direction)[1].items()}


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


def _listed(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} tokens one by one" if set(sizes) == {1} else "+".join(map(str, sizes))


PROMPT = 3
RECORDING_ADVICE = "Write into a store only where no graph holds it: while autograd records, concatenate"


def check_steps_with_and_without_autograd_mix(variant: Any, case: Case) -> None:
    """A prompt that autograd records and steps that it does not, and the other way round: outputs and gradients hold."""
    inputs, compare = drawn(case, variant)
    n = case.query_length
    with torch.no_grad():
        expected, _ = feed(variant, inputs, [PROMPT, n - PROMPT])

    def agree(mixed: Gradients, usual: Gradients, words: str) -> None:
        compare.same_gradients(
            mixed, usual, f"the same gradient where all is recorded ({words}, capacity {capacity})", RECORDING_ADVICE
        )

    for capacity in (None, n):
        for names in (tuple(inputs.tensors()), ("query",)):
            usual = _prompt_gradients(compare, names, capacity, None, expected)
            for length in (PROMPT, PROMPT - 1):
                mixed = _prompt_gradients(compare, names, capacity, length, expected)
                agree(mixed, usual, "a prompt before unrecorded steps")
        usual, mixed = (_step_gradients(variant, inputs, recording, capacity) for recording in (True, False))
        agree(mixed, usual, "steps after an unrecorded prompt")


def _prompt_gradients(
    compare: Comparer, names: tuple[str, ...], capacity: int | None, length: int | None, expected: Tensor
) -> Gradients:
    """Gradients of a recorded prompt by the inputs of these names, after unrecorded steps that follow its first `length` tokens."""
    variant, inputs = compare.variant, compare.inputs
    n = compare.case.query_length
    leaves = {name: x for name, x in recorded(inputs.tensors()).items() if name in names}
    with torch.enable_grad():
        first, state = feed(variant, inputs.rebuilt({**inputs.tensors(), **leaves}), [PROMPT], capacity)
    if length is not None:
        with torch.no_grad():
            try:
                state = state if length == PROMPT else state.crop(length)
            except UnsupportedRequest:  # the others of its tokens stay, and are counted from there
                length = PROMPT
            fed = [one.answer.out for one in steps(variant, inputs, [1] * (n - length), state, length)]
            got = torch.cat([first[:, :, :length].detach(), *fed], dim=2)
        versus = f"the run that records nothing (capacity {capacity}, {length} tokens kept of the prompt)"
        compare.same(got, expected, versus, ADVICE)
    if not first.requires_grad:  # nothing of it depends on these inputs
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    try:
        return slopes(first, leaves, direction_for(inputs)[:, :, :PROMPT])
    except RuntimeError as fault:
        compare.fail(
            f"the gradient of a recorded prompt is gone after unrecorded steps: {short(fault, 160)}", RECORDING_ADVICE
        )


def _step_gradients(variant: Any, inputs: Inputs, past_in_graph: bool, capacity: int | None) -> Gradients:
    """Gradients of the steps after a prompt by their own tokens."""
    with torch.set_grad_enabled(past_in_graph):
        leaves = recorded(inputs.tensors())
        part = inputs.rebuilt(leaves)
        _, state = feed(variant, part, [PROMPT], capacity)
    with torch.enable_grad():
        out = step(variant, part, PROMPT, inputs.case.query_length, state).out
    grads = slopes(out, leaves, direction_for(inputs)[:, :, PROMPT:])
    return {name: g[:, :, PROMPT:] if g.dim() > 2 else g for name, g in grads.items()}


ODD: tuple[dict[str, Any], ...] = (
    {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "key_dim": 1, "value_dim": 1},
    {"batch": 3, "num_heads": 5, "num_kv_heads": 5, "head_dim": 3, "key_dim": 3, "value_dim": 3},
)
TOGETHER = (
    "left_window+key_mask_holes+gqa",
    "key_mask_left+score_mod",
    "left_window+mask_mod",
    "segments+left_window+gqa",
    "segments+score_mod",
    "segments+mask_mod",
    "key_mask_left+mask+bias",
    "left_window+sinks",
    "softcap+gqa+value_dim",
    "key_mask_left+gqa+value_dim",
    "key_mask_holes+query_lengths",
)
UNORDERED = ("window", "key_mask_holes", "segments", "mask_of_each", "mask_mod", "bias", "score_mod", "gqa")
"""Features that are fed without causal too: there a query sees its whole chunk."""
QUICK = (
    *("key_mask_left", "key_mask_holes", "segments", "left_window", "value_dim", "query_dim", "bias_of_each"),
    *("mask_of_each", "mask_mod", "score_mod", "sinks", "softcap", "scale"),
)


def causal_cases(scope: Scope, *combinations: str, needs: tuple[str, ...] = NEEDS, **sizes: Any) -> list[Case]:
    """Causal cases with these features beside; "" is causal alone."""
    return scope.cases(*(f"causal+{x}" for x in combinations), needs=needs, **sizes)


def _whole(scope: Scope) -> Iterable[Case]:
    """Every feature that leaves lengths alone; offsets have a check of their own."""
    labels = [
        label
        for label, f in FEATURES.items()
        if "offset" not in f.sets and not {"query_length", "key_length"} & set(f.sizes) and compatible("causal", label)
    ]
    yield from causal_cases(scope, "", *(QUICK if scope.quick else labels))
    for dtype in scope.dtypes:
        yield from causal_cases(
            scope, *(("key_mask_left+gqa",) if scope.quick else ("key_mask_left+gqa", "")), dtype=dtype
        )
    yield from scope.cases("key_mask_left", needs=("state",))
    if scope.quick:
        return
    yield from causal_cases(scope, *TOGETHER)
    for sizes in ODD:
        yield from causal_cases(scope, "", note="odd", **sizes)
    yield from scope.cases("", *UNORDERED, needs=("state",))


def _long(scope: Scope) -> Iterable[Case]:
    one: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1}
    sizes: dict[str, Any] = {**one, "query_length": 140, "key_length": 140}
    yield from causal_cases(scope, "", **sizes)
    if not scope.quick:
        yield from causal_cases(scope, "key_mask_holes", "left_window", **sizes)
        yield from causal_cases(scope, "+".join(scope.declared("bias", "sinks", "mask_mod")), **sizes)
        yield from scope.cases("", needs=("state",), **sizes)
        yield from causal_cases(scope, "", **one, query_length=530, key_length=530)


def _gradient(scope: Scope) -> Iterable[Case]:
    few = ("", "gqa", "key_mask_left", "bias")
    many = (
        *("key_mask_holes", "value_dim", "query_dim", "scale", "left_window", "segments", "mask_of_each", "mask_mod"),
        *("score_mod", "softcap", "sinks", "hiding_bias"),
    )
    needs = (*NEEDS, "backward")
    yield from causal_cases(scope, *(few if scope.quick else (*few, *many)), needs=needs)
    if not scope.quick:
        yield from (case("causal", needs=needs, dtype=d) for d in scope.other_dtypes)


def _recorded(scope: Scope) -> Iterable[Case]:
    labels = ("", "key_mask_left") if scope.quick else ("", "key_mask_left", "segments", "gqa")
    return causal_cases(scope, *labels, needs=(*NEEDS, "backward"))


CHECKS = (
    Check(check_chunked_decoding_equals_full_attention, "state", _whole),
    Check(check_long_sequences_may_be_split_anywhere, "state", _long),
    Check(check_state_gradients_match_definition, "state", _gradient),
    Check(check_steps_with_and_without_autograd_mix, "state", _recorded),
)
