"""Graph capture and memory, where claimed. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from attnlab.conformance.cases import Case, case
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.inputs import draw, exact_and_bound
from attnlab.conformance.messages import demand, demand_close
from attnlab.conformance.watching import Watch


def check_compiles_without_a_graph_break(variant: Any, case: Case) -> None:
    """Where claimed: torch.compile(fullgraph=True) captures the call and gives the same output."""
    inputs = draw(case, variant)
    torch.compiler.reset()
    compiled: Any = torch.compile(variant, fullgraph=True, backend="eager")
    try:
        with torch.no_grad():
            got = compiled(inputs.query, inputs.key, inputs.value, **inputs.arguments).out
    except Exception as fault:
        first = str(fault).strip().splitlines()[0]
        demand(
            False,
            variant,
            case,
            f"torch.compile(fullgraph=True) failed: {type(fault).__name__}: {first}",
            "Drop the claim `compiles`, or keep Python that reads tensor values out of attend()",
        )
    finally:
        torch.compiler.reset()
    exact, limit = exact_and_bound(variant, inputs)
    demand_close(
        got,
        exact,
        limit,
        variant,
        case,
        what="out",
        versus="the float64 definition (compiled)",
        advice="The compiled call takes another path than the eager one",
    )


def check_largest_intermediate_grows_linearly(variant: Any, case: Case) -> None:
    """Where claimed: no tensor made on the way, forward or backward, grows faster than the length."""
    sizes = {}
    for length in (case.query_length, 2 * case.query_length):
        one = draw(_at(case, length), variant)
        mode = Watch()
        recording = variant.capabilities.backward
        named = {n: x.clone().requires_grad_(recording) for n, x in one.tensors().items()}
        with mode, torch.set_grad_enabled(recording):
            out = one.rebuilt(named).run(variant).out
            if recording:
                out.sum().backward()
        sizes[length] = mode.largest
    (short, first), (long, second) = sizes.items()
    # Linear growth doubles; a tile or chunk that is not yet full may round up, so allow a quarter more.
    demand(
        second <= 2.5 * first,
        variant,
        case,
        f"the largest intermediate grows from {first} elements at L={short} to {second} at L={long}, a factor of "
        f"{second / first:.2f} > 2.5",
        "Drop the claim `linear_memory`, or never hold all pairs at once",
    )


def _at(case: Case, length: int) -> Case:
    from dataclasses import replace

    return replace(case, query_length=length, key_length=length)


def _compiled(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    if not scope.quick:
        yield case("causal", "gqa", dtype=scope.base)


def _long(scope: Scope) -> Iterable[Case]:
    # Longer than the tiles of usual kernels; recurrences have short chunks and walk token by token under the counter.
    length = 96 if scope.family == "recurrent" else 700
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": length, "key_length": length}
    yield case("causal", dtype=scope.base, **sizes)
    if not scope.quick:
        yield case(dtype=scope.base, **sizes)


CHECKS = (
    Check(check_compiles_without_a_graph_break, "graphs", _compiled, claims=("compiles",)),
    Check(
        check_largest_intermediate_grows_linearly, "memory", _long, claims=("linear_memory",), asks_more=True
    ),
)
