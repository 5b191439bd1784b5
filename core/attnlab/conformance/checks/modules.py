"""A variant is a module: copies, state_dicts and recomputation give the same answer. Needs torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, gradients, recorded, slopes, trained
from attnlab.conformance.oracle.inputs import Inputs
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like


def check_copies_agree(variant: Any, case: Case) -> None:
    """deepcopy, and a new instance with the same options and state_dict, give the same output; pickle where it can."""
    inputs, compare = drawn(case, variant)
    expected = inputs.out(variant)
    made = like(variant).to(inputs.query.device, inputs.query.dtype)
    made.load_state_dict(variant.state_dict())
    others = {"deepcopy": copy.deepcopy(variant), "a new instance with its options and state_dict": made}
    if "<locals>" not in type(variant).__qualname__:  # a class in a function cannot be pickled by anyone
        others["pickle"] = pickle.loads(pickle.dumps(variant))
    advice = "Keep tensors in nn.Parameter or register_buffer, and every option in self.options"
    own = {x.data_ptr(): name for name, x in variant.state_dict().items() if x.numel()}
    for words, other in others.items():
        compare.same(inputs.out(other), expected, f"the original's ({words})", advice)
        shared = [own[x.data_ptr()] for x in other.state_dict().values() if x.numel() and x.data_ptr() in own]
        fault = f"{', '.join(shared)} of the original and of {words} are one tensor"
        compare.demand(not shared, fault, "A copy trains on its own: share no parameter and no buffer")


def check_recomputation_gives_the_same_gradients(variant: Any, case: Case) -> None:
    """Under torch.utils.checkpoint, dropout included, gradients are those of a plain run with the same seed."""
    inputs, compare = drawn(case, variant)
    more = {"dropout_p": 0.4} if "dropout" in case.needs else {}
    with seeded_draws(6, case.device):
        _, expected = gradients(variant, inputs, direction_for(inputs), **more)
    with seeded_draws(6, case.device):
        got = _recomputed(variant, inputs, more)
    versus = "the gradient without torch.utils.checkpoint"
    advice = "Draw dropout from torch's default generator, and keep nothing between forward and backward"
    compare.same_gradients(got, {n: expected[n] for n in got}, versus, advice)


def check_gradients_reach_every_parameter(variant: Any, case: Case) -> None:
    """Each parameter that requires a gradient receives one that is not all zero."""
    inputs, compare = drawn(case, variant)
    _, grads = gradients(variant, inputs, direction_for(inputs))
    for name in trained(variant):
        nonzero = bool(grads[name].count_nonzero())
        compare.demand(
            nonzero, f"parameter {name} receives no gradient", "Use it in the forward, or do not register it"
        )


def _recomputed(variant: Any, inputs: Inputs, more: dict[str, Any]) -> Gradients:
    leaves = recorded(inputs.tensors())

    def run(*tensors: Tensor) -> Tensor:
        out: Tensor = inputs.rebuilt(dict(zip(leaves, tensors, strict=True))).run(variant, **more).out
        return out

    with torch.enable_grad():
        return slopes(checkpoint(run, *leaves.values(), use_reentrant=False), leaves, direction_for(inputs))


def _copies(scope: Scope) -> Iterable[Case]:
    return scope.cases("", "causal+gqa")


def _recomputing(scope: Scope) -> Iterable[Case]:
    for labels in ("", "causal"):
        yield from scope.cases(labels, needs=("backward",))
        yield from scope.cases(labels, needs=("backward", "dropout"), note="dropout")


def _plain(scope: Scope) -> Iterable[Case]:
    return scope.cases("", needs=("backward",))


CHECKS = (
    Check(check_copies_agree, "modules", _copies, random_too=True),
    Check(check_recomputation_gives_the_same_gradients, "modules", _recomputing, random_too=True, slow=True),
    Check(check_gradients_reach_every_parameter, "modules", _plain, random_too=True),
)
