"""Memory that grows with the length and no faster, where claimed: counted, not timed. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._watching import Watch
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import Check, Scope

GROWTH = 2.5
"""What a doubled length may do: linear growth doubles; a tile or chunk that is not yet full may round up, a quarter more."""


def check_largest_intermediate_grows_linearly(variant: Any, case: Case) -> None:
    """Where claimed: no tensor made on the way, forward or backward, grows faster than the length."""
    recording = variant.capabilities.backward

    def largest(length: int) -> int:
        one = draw(_at(case, length), variant)
        mode = Watch()
        named = {n: x.clone().requires_grad_(recording) for n, x in one.tensors().items()}
        with mode, torch.set_grad_enabled(recording):
            out = one.rebuilt(named).run(variant).out
            if recording:
                out.sum().backward()
        return mode.largest

    _demand_growth(variant, case, largest, "the largest intermediate grows", "never hold all pairs at once")


def check_memory_kept_for_backward_grows_linearly(variant: Any, case: Case) -> None:
    """Where claimed: what autograd keeps between forward and backward, all told, grows no faster than the length."""

    def all_kept(length: int) -> int:
        one = draw(_at(case, length), variant)
        named = {n: x.clone().requires_grad_() for n, x in one.tensors().items()}
        kept: dict[int, Tensor] = {}  # one of each storage, held so that no address is used twice

        def keep(x: Tensor) -> Tensor:
            kept.setdefault(x.untyped_storage().data_ptr(), x.detach())
            return x.detach()

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = one.rebuilt(named).run(variant).out
        del out
        return sum(x.untyped_storage().nbytes() // x.element_size() for x in kept.values())

    _demand_growth(
        variant,
        case,
        all_kept,
        "what is kept for the backward grows",
        "save inputs and row sums and compute tiles again in the backward (torch.utils.checkpoint does)",
    )


def _demand_growth(variant: Any, case: Case, measure: Callable[[int], int], what: str, advice: str) -> None:
    """Fail where a doubled length asks for more, and a length doubled again as well.

    Up to some size a variant may form every pair, where that is cheaper than tiles: growth counts beyond it.
    """
    short = case.query_length
    first, second = measure(short), measure(2 * short)
    if second > GROWTH * first:
        short, first, second = 2 * short, second, measure(4 * short)
    demand(
        second <= GROWTH * first,
        variant,
        case,
        f"{what} from {first} elements at L={short} to {second} at L={2 * short}, a factor of "
        f"{second / max(first, 1):.2f} > {GROWTH}",
        f"Drop the claim `linear_memory`, or {advice}",
    )


def _at(case: Case, length: int) -> Case:
    return replace(case, query_length=length, key_length=length)


def _long(scope: Scope) -> Iterable[Case]:
    # Longer than the tiles of usual kernels; recurrences have short chunks and walk token by token under the counter.
    length = 48 if scope.stepwise else 700
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": length, "key_length": length}
    yield case("causal", dtype=scope.base, **sizes)
    if not scope.quick:
        yield case(dtype=scope.base, **sizes)


def _long_recorded(scope: Scope) -> Iterable[Case]:
    for one in _long(scope):
        yield replace(one, needs=("backward",))


CHECKS = (
    Check(
        check_largest_intermediate_grows_linearly, "memory", _long, claims=("linear_memory",), asks_more=True, slow=True
    ),
    Check(
        check_memory_kept_for_backward_grows_linearly,
        "memory",
        _long_recorded,
        claims=("linear_memory",),
        asks_more=True,
        slow=True,
    ),
)
