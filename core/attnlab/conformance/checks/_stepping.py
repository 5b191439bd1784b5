"""Feeding a sequence through a state, and what must come out of it. Needs torch; used by the checks of states.

A sequence of n tokens is fed as chunks. A query of a chunk may see the past and its own chunk, so what must come out is
the definition's answer for the whole with the keys after a query's chunk hidden; with `causal` that hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import Bound, bound, largest, rounding_bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, judging, plain_dtype, reduction_terms
from attnlab.conformance.oracle.sampling import define_rows, visible_rows
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
    (q0, q1), (k0, k1) = queries, keys
    answer = variant(
        inputs.query[:, :, q0:q1],
        inputs.key[:, :, k0:k1],
        inputs.value[:, :, k0:k1],
        state=state,
        **{**arguments_of(inputs, queries, keys), **more},
    )
    demand(
        answer.state is not None,
        variant,
        inputs.case,
        "a state was given and none came back",
        "Return the next state in AttentionOutput",
    )
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
            if isinstance(x, str):  # of the square whole both words say 0
                return "bottom_right" if x == "bottom_right" and queries == keys else q0
            return x + q0
        return x

    cut_to = {n: cut(n, x) for n, x in inputs.arguments.items()}
    if q0 != k0:
        cut_to.setdefault("offset", q0)
    return cut_to


def feed(variant: Any, inputs: Inputs, sizes: Sequence[int], capacity: int | None = None) -> tuple[Tensor, Any]:
    """Out of the first sum(sizes) tokens fed in chunks of these sizes, and the state after them."""
    state = fresh(variant, inputs, capacity)
    parts, start = [], 0
    for size in sizes:
        answer = step(variant, inputs, start, start + size, state)
        state = answer.state
        parts.append(answer.out)
        start += size
    return torch.cat(parts, dim=2), state


def feedings(n: int, every: bool) -> Iterator[tuple[str, list[int], int | None]]:
    """Ways to feed n tokens: in words, the chunks' sizes, the state's capacity. Not `every` way: two that differ most."""
    ones, twos, threes = ([size] * (n // size) + [n % size] * (n % size > 0) for size in (1, 2, 3))
    yield "one by one", ones, n
    yield "with empty chunks", [0, 3, 0, n - 3], None
    if every:
        yield "one by one", ones, None
        yield "in twos", twos, n + 5
        yield "in threes", threes, None
        yield "in two chunks", [n // 2 - 1, n - n // 2 + 1], n
        yield "in one chunk", [n], None
        yield "in one chunk", [n], n + 5
        yield "with empty chunks", [0, 3, 0, n - 3, 0, 0], n


def seen_by_chunks(inputs: Inputs, sizes: Sequence[int]) -> Tensor:
    """Who sees whom where a query's own chunk is the last that it can see; bool `[B, Hq, L, L]`."""
    ends, stop = [], 0
    for size in sizes:
        stop += size
        ends += [stop] * size
    return up_to(inputs.visible(), torch.tensor(ends, device=inputs.query.device))


def up_to(visible: Tensor, ends: Tensor) -> Tensor:
    """`visible` without the keys that row i has not been told of: those from `ends[i]` on (one end for all, or one each)."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    return visible & (keys < ends.view(-1, 1))


def is_defined(variant: Any, inputs: Inputs) -> bool:
    """Whether something outside of the variant says what is right, and the variant is held to it."""
    try:
        require_exact(variant, inputs)
        judging(variant)
    except NotApplicable:
        return False
    return True


def comparable(variant: Any, inputs: Inputs, visible: Tensor) -> bool:
    """Whether `truth` can tell what must come out where `visible` says who sees whom."""
    return torch.equal(visible, inputs.visible()) or is_defined(variant, inputs)


def truth(variant: Any, inputs: Inputs, visible: Tensor | None = None, what: str = "out") -> tuple[Tensor, Bound, str]:
    """What must come out, the bound on errors against it, and its name.

    The definition's answer, or, where there is none or the variant claims only to approximate it, the variant's own answer
    without a state, which knows nothing of chunks: `NotApplicable` where they hide something.
    """
    case = inputs.case
    whole = inputs.visible()
    visible = whole if visible is None else visible
    if is_defined(variant, inputs):
        with torch.no_grad():
            exact = define(variant, inputs, visible=visible)[what]
            low = plain_dtype(case.dtype)
            plain = define(variant, inputs, dtype=getattr(torch, low), visible=visible)[what]
        limit = bound(
            case.dtype,
            exact=exact,
            plain=plain,
            plain_dtype=low,
            terms=reduction_terms(case),
            magnitude=largest(inputs.value) if what == "out" else 1.0,
        )
        return exact, limit, "the float64 definition of the whole"
    if not torch.equal(visible, whole):
        raise NotApplicable("without a definition there is nothing to compare chunks with that see no future")
    return *own_answer(variant, inputs, what), "the same call without a state"


def own_answer(variant: Any, inputs: Inputs, what: str = "out") -> tuple[Tensor, Bound]:
    """The variant's own answer without a state, and the bound between it and another run."""
    more = {} if what == "out" else {f"need_{what}": True}
    with torch.no_grad():
        own: Tensor = getattr(inputs.run(variant, **more), what)
    size = max(largest(own), largest(inputs.value))
    return own, rounding_bound(inputs.case.dtype, terms=reduction_terms(inputs.case), magnitude=size)


def same(variant: Any, inputs: Inputs, got: Tensor, expected: Tensor, versus: str, advice: str = ADVICE) -> None:
    """Fail unless two runs of one variant agree within rounding."""
    case: Case = inputs.case
    size = max(largest(expected), largest(inputs.value))
    limit = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size)
    demand_close(got, expected, limit, variant, case, what="out", versus=versus, advice=advice)


def true_rows(variant: Any, inputs: Inputs, rows: list[int], ends: list[int]) -> tuple[Tensor, Bound, str]:
    """`truth` of some query rows of a long sequence, which see the keys before `ends`: definitions take any rows."""
    case = inputs.case
    if not is_defined(variant, inputs):
        if not inputs.arguments.get("causal"):
            raise NotApplicable("without a definition there is nothing to compare chunks with that see no future")
        own, limit = own_answer(variant, inputs)
        return own[:, :, rows], limit, "the same call without a state"
    visible = up_to(visible_rows(inputs, rows), torch.tensor(ends, device=inputs.query.device))
    low = plain_dtype(case.dtype)
    with torch.no_grad():
        exact = define_rows(variant, inputs, rows, visible)["out"]
        plain = define_rows(variant, inputs, rows, visible, dtype=getattr(torch, low))["out"]
    limit = bound(
        case.dtype,
        exact=exact,
        plain=plain,
        plain_dtype=low,
        terms=reduction_terms(case),
        magnitude=largest(inputs.value),
    )
    return exact, limit, "the float64 definition of the whole"
