"""Steps that autograd records beside steps that it does not. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import NEEDS, feed, same, step
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import UnsupportedRequest

PROMPT = 3
ADVICE = "Write into a store only where no graph holds it: while autograd records, concatenate"


def check_recorded_and_unrecorded_steps_mix(variant: Any, case: Case) -> None:
    """A prompt that autograd records and steps that it does not, and the other way round: outputs and gradients hold."""
    inputs = draw(case, variant)
    n = case.query_length
    with torch.no_grad():
        expected, _ = feed(variant, inputs, [PROMPT, n - PROMPT])
    everything = tuple(inputs.tensors())
    for capacity in (None, n):
        for names in (everything, ("query",)):
            usual = _prompt_gradients(variant, inputs, names, capacity, None, expected)
            for kept in (PROMPT, PROMPT - 1):
                mixed = _prompt_gradients(variant, inputs, names, capacity, kept, expected)
                _agree(variant, inputs, mixed, usual, f"a prompt before unrecorded steps, capacity {capacity}")
        usual = _step_gradients(variant, inputs, True, capacity)
        mixed = _step_gradients(variant, inputs, False, capacity)
        _agree(variant, inputs, mixed, usual, f"steps after an unrecorded prompt, capacity {capacity}")


def _prompt_gradients(
    variant: Any, inputs: Inputs, names: tuple[str, ...], capacity: int | None, kept: int | None, expected: Tensor
) -> dict[str, Tensor]:
    """Gradients of a recorded prompt by the inputs of these names, after unrecorded steps that follow its first `kept` tokens."""
    case = inputs.case
    leaves = {name: x for name, x in recorded(inputs.tensors()).items() if name in names}
    with torch.enable_grad():
        first, state = feed(variant, inputs.rebuilt({**inputs.tensors(), **leaves}), [PROMPT], capacity)
    if kept is not None:
        with torch.no_grad():
            try:
                state = state if kept == PROMPT else state.crop(kept)
            except UnsupportedRequest:  # the others of its tokens stay, and are counted from there
                kept = PROMPT
            parts = [first[:, :, :kept].detach()]
            for start in range(kept, case.query_length):
                answer = step(variant, inputs, start, start + 1, state)
                state = answer.state
                parts.append(answer.out)
        what = f"the run that records nothing (capacity {capacity}, {kept} tokens kept of the prompt)"
        same(variant, inputs, torch.cat(parts, dim=2), expected, what)
    if not first.requires_grad:  # nothing of it depends on these inputs
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    try:
        found = torch.autograd.grad(
            first,
            list(leaves.values()),
            direction_for(inputs)[:, :, :PROMPT],
            allow_unused=True,
            materialize_grads=True,
        )
    except RuntimeError as fault:
        told = " ".join(str(fault).split())[:160]
        demand(
            False, variant, case, f"the gradient of a recorded prompt is gone after unrecorded steps: {told}", ADVICE
        )
    return dict(zip(leaves, found, strict=True))


def _step_gradients(variant: Any, inputs: Inputs, past_in_graph: bool, capacity: int | None) -> dict[str, Tensor]:
    """Gradients of the steps after a prompt by their own tokens."""
    with torch.set_grad_enabled(past_in_graph):
        leaves = recorded(inputs.tensors())
        part = inputs.rebuilt(leaves)
        _, state = feed(variant, part, [PROMPT], capacity)
    with torch.enable_grad():
        out = step(variant, part, PROMPT, inputs.case.query_length, state).out
    found = torch.autograd.grad(
        out, list(leaves.values()), direction_for(inputs)[:, :, PROMPT:], allow_unused=True, materialize_grads=True
    )
    return {name: g[:, :, PROMPT:] if g.dim() > 2 else g for name, g in zip(leaves, found, strict=True)}


def _agree(variant: Any, inputs: Inputs, mixed: dict[str, Tensor], usual: dict[str, Tensor], word: str) -> None:
    case = inputs.case
    for name, wanted in usual.items():
        size = max(largest(wanted), largest(direction_for(inputs)) * largest(inputs.value))
        demand_close(
            mixed[name],
            wanted,
            rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus=f"the same gradient where all is recorded ({word})",
            advice=ADVICE,
        )


def _recorded(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("key_mask_left",)) if scope.quick else ((), ("key_mask_left",), ("segments",), ("gqa",)):
        yield case("causal", *labels, needs=(*NEEDS, "backward"), dtype=scope.base)


CHECKS = (Check(check_recorded_and_unrecorded_steps_mix, "state", _recorded),)
