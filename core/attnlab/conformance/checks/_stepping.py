"""A sequence fed through a state, and what must come out of it. Needs torch; used by the checks of states.

A sequence of n tokens is fed as chunks. The past and its own chunk are visible to a query of a chunk, so the expected
output is the definition's answer for the whole with the keys after a query's chunk hidden; with `causal` that hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.bounds import defined_and_bound
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, defining, reduction_terms
from attnlab.conformance.running.check import NotApplicable

NEEDS = ("state", "causal")
ADVICE = (
    "With a state positions continue from its length: the mask of a step is the full mask's last rows, "
    "and the state must hold every token that came before, once"
)

Span = tuple[int, int]


def fresh(variant: Any, inputs: Inputs, capacity: int | None = None) -> Any:
    """An empty state for the call's batch, in key's dtype and on its device."""
    return variant.init_state(
        inputs.query.shape[0], capacity=capacity, device=inputs.key.device, dtype=inputs.key.dtype
    )


def step(variant: Any, inputs: Inputs, start: int, stop: int, state: Any, **more: Any) -> Any:
    """The `AttentionOutput` of tokens [start, stop) of the sequence through `state`."""
    return call(variant, inputs, (start, stop), (start, stop), state, **more)


def call(variant: Any, inputs: Inputs, queries: Span, keys: Span, state: Any, **more: Any) -> Any:
    """The `AttentionOutput` of those queries and those new keys through `state`, which holds the keys before them."""
    q, k = slice(*queries), slice(*keys)
    arguments = {**arguments_of(inputs, queries, keys), **more}
    answer = variant(inputs.query[:, :, q], inputs.key[:, :, k], inputs.value[:, :, k], state=state, **arguments)
    fault, advice = "a state was given and none came back", "Return the next state in AttentionOutput"
    demand(answer.state is not None, variant, inputs.case, fault, advice)
    return answer


def arguments_of(inputs: Inputs, queries: Span, keys: Span) -> dict[str, Any]:
    """The keyword arguments of the whole, cut to a call: masks and biases span past and new keys."""
    (q0, q1), (k0, k1) = queries, keys

    def cut(name: str, x: Any) -> Any:
        if name == "key_mask":
            return x[:, k0:k1]
        if name == "key_lengths":
            return (x - k0).clamp(0, k1 - k0)
        if name == "query_lengths":
            return (x - q0).clamp(0, q1 - q0)
        if name == "segments":
            return x[0][:, q0:q1], x[1][:, k0:k1]
        if name == "gates":
            return {n: gate[:, :, k0:k1] for n, gate in x.items()}
        if name in ("mask", "bias"):
            rows = x[..., q0:q1, :] if x.shape[-2] > 1 else x
            return rows[..., :k1] if x.shape[-1] > 1 else rows
        if name == "offset":
            if isinstance(x, str):  # of the square whole both words mean 0
                return "bottom_right" if x == "bottom_right" and queries == keys else q0
            return x + q0
        return x

    arguments = {n: cut(n, x) for n, x in inputs.arguments.items()}
    if q0 != k0:
        arguments.setdefault("offset", q0)
    return arguments


class Step(NamedTuple):
    """One chunk that was fed: its tokens [start, stop) and what came out."""

    start: int
    stop: int
    answer: Any


def steps(
    variant: Any, inputs: Inputs, sizes: Sequence[int], state: Any, start: int = 0, **more: Any
) -> Iterator[Step]:
    """Feed chunks of these sizes, from token `start` on, through `state` and the states that follow it."""
    for size in sizes:
        answer = step(variant, inputs, start, start + size, state, **more)
        yield Step(start, start + size, answer)
        state, start = answer.state, start + size


def feed(variant: Any, inputs: Inputs, sizes: Sequence[int], capacity: int | None = None) -> tuple[Tensor, Any]:
    """Out of the first sum(sizes) tokens fed in chunks of these sizes, and the state after them."""
    answers = [fed.answer for fed in steps(variant, inputs, sizes, fresh(variant, inputs, capacity))]
    return torch.cat([answer.out for answer in answers], dim=2), answers[-1].state


def ends_of(sizes: Sequence[int]) -> list[int]:
    """For each token the end of its chunk."""
    ends: list[int] = []
    for size in sizes:
        ends += [len(ends) + size] * size
    return ends


def visible_by_chunks(inputs: Inputs, sizes: Sequence[int]) -> Tensor:
    """Visibility where a query's own chunk is the last that it can see; bool `[B, Hq, L, L]`."""
    return up_to(inputs.visible(), torch.tensor(ends_of(sizes), device=inputs.query.device))


def up_to(visible: Tensor, ends: Tensor) -> Tensor:
    """`visible` without the keys from `ends[i]` on, which come after row i (one end for all, or one each)."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys < ends.view(-1, 1))


def is_defined(variant: Any, inputs: Inputs) -> bool:
    """Whether there is a definition outside of the variant, and the variant is held to it."""
    try:
        require_exact(variant, inputs)
        defining(variant)
    except NotApplicable:
        return False
    return True


def comparable(variant: Any, inputs: Inputs, visible: Tensor) -> bool:
    """Whether `truth` knows the expected output under this visibility."""
    return torch.equal(visible, inputs.visible()) or is_defined(variant, inputs)


def truth(
    variant: Any, inputs: Inputs, visible: Tensor | None = None, what: str = "out", rows: Sequence[int] | None = None
) -> tuple[Tensor, Bound, str]:
    """The expected output, the bound on errors against it, and its name.

    The definition's answer, or, where there is none or the variant claims only to approximate it, the variant's own answer
    without a state, which knows nothing of chunks: `NotApplicable` where they hide something. rows: of these rows alone.
    """
    whole = inputs.visible(rows)
    visible = whole if visible is None else visible
    if is_defined(variant, inputs):
        exact = defined_and_bound(variant, inputs, what, visible=visible, rows=rows)
        return *exact, "the float64 definition of the whole"
    if not torch.equal(visible, whole):
        raise NotApplicable("without a definition there is nothing to compare chunks with that see no future")
    own: Tensor = getattr(inputs.answer(variant, **({} if what == "out" else {f"need_{what}": True})), what)
    size = max(largest(own), largest(inputs.value))
    limit = rounding_bound(inputs.case.dtype, terms=reduction_terms(inputs.case), magnitude=size)
    return own if rows is None else own[:, :, rows], limit, "the same call without a state"
