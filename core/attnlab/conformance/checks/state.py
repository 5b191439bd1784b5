"""Decoding with a state: full equals any chunking equals one by one, forward and gradient. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import ADVICE, NEEDS, feed, step, steps
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.compare.comparer import Comparer, drawn, short
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, recorded, slopes
from attnlab.conformance.oracle.inputs import Inputs
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import UnsupportedRequest


def _slopes(variant: Any, inputs: Inputs, run: Any, more: dict[str, Tensor]) -> Gradients:
    """Gradients of `run(inputs)` by input, and by the leaves in `more`."""
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        return slopes(run(inputs.rebuilt(leaves)), {**leaves, **more}, direction_for(inputs))


def chunked_gradients(variant: Any, inputs: Inputs, sizes: Sequence[int]) -> Gradients:
    """Gradients by input of a run in chunks of these sizes."""
    return _slopes(variant, inputs, lambda x: feed(variant, x, sizes)[0], {})


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


def causal_cases(scope: Scope, *combinations: str, needs: tuple[str, ...] = NEEDS, **sizes: Any) -> list[Case]:
    """Causal cases with these features beside; "" is causal alone."""
    return scope.cases(*(f"causal+{x}" for x in combinations), needs=needs, **sizes)


def _recorded(scope: Scope) -> Iterable[Case]:
    labels = ("", "key_mask_left") if scope.quick else ("", "key_mask_left", "segments", "gqa")
    yield from causal_cases(scope, *labels, needs=(*NEEDS, "backward"))
    yield from causal_requests(scope, "backward", full=10, quick=0, seed=25000)


CHECKS = (Check(check_steps_with_and_without_autograd_mix, "state", _recorded),)
