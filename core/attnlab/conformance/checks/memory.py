"""Memory that grows with the length and no faster, where claimed: counted, not timed. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._watching import Watch
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import recorded
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope

GROWTH = 2.5
"""The most that a doubled length may add: linear growth doubles; a tile or chunk that is not yet full may round up, a quarter more."""


def check_linear_memory_of_intermediates(variant: Any, case: Case) -> None:
    """Where claimed: no tensor made on the way, forward or backward, grows faster than the length."""
    recording = variant.capabilities.backward

    def largest(inputs: Inputs) -> int:
        inputs = inputs.rebuilt(recorded(inputs.tensors())) if recording else inputs
        mode = Watch()
        with mode, torch.set_grad_enabled(recording):
            out = inputs.run(variant).out
            if recording:
                out.sum().backward()
        return mode.largest

    _demand_growth(variant, case, largest, "the largest intermediate grows", "never hold all pairs at once")


def check_linear_memory_saved_for_backward(variant: Any, case: Case) -> None:
    """Where claimed: what autograd keeps between forward and backward, all told, grows no faster than the length."""

    def saved(inputs: Inputs) -> int:
        storages: dict[int, Tensor] = {}  # one of each storage, held so that no address is used twice

        def keep(x: Tensor) -> Tensor:
            storages.setdefault(x.untyped_storage().data_ptr(), x.detach())
            return x.detach()

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = inputs.rebuilt(recorded(inputs.tensors())).run(variant).out
        del out
        return sum(x.untyped_storage().nbytes() // x.element_size() for x in storages.values())

    advice = "save inputs and row sums and compute tiles again in the backward (torch.utils.checkpoint does)"
    _demand_growth(variant, case, saved, "what is kept for the backward grows", advice)


def _demand_growth(variant: Any, case: Case, measure: Callable[[Inputs], int], what: str, advice: str) -> None:
    """Fail where a doubled length takes more, and a length doubled again as well.

    Up to some size a variant may form every pair, where that is cheaper than tiles: growth counts beyond it.
    """

    def at(length: int) -> int:
        return measure(draw(replace(case, query_length=length, key_length=length), variant))

    short = case.query_length
    first, second = at(short), at(2 * short)
    if second > GROWTH * first:
        short, first, second = 2 * short, second, at(4 * short)
    factor = f"a factor of {second / max(first, 1):.2f} > {GROWTH}"
    fault = f"{what} from {first} elements at L={short} to {second} at L={2 * short}, {factor}"
    demand(second <= GROWTH * first, variant, case, fault, f"Drop the claim `linear_memory`, or {advice}")


def _long(*needs: str) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        # Longer than the tiles of usual kernels; recurrences have short chunks and walk token by token under the counter.
        length = 48 if scope.stepwise else 700
        sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": length, "key_length": length}
        return scope.cases(*(("causal",) if scope.quick else ("causal", "")), needs=needs, **sizes)

    return make


_LINEAR: dict[str, Any] = {"claims": ("linear_memory",), "asks_more": True, "slow": True}


CHECKS = (
    Check(check_linear_memory_of_intermediates, "memory", _long(), **_LINEAR),
    Check(check_linear_memory_saved_for_backward, "memory", _long("backward"), **_LINEAR),
)
