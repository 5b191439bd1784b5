"""A variant is a module: copies, state_dicts and recomputation give the same answer. Needs torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients, recorded, trained
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like


def check_copies_agree(variant: Any, case: Case) -> None:
    """deepcopy, and a new instance with the same options and state_dict, give the same output; pickle where it can."""
    inputs = draw(case, variant)
    with torch.no_grad():
        expected = inputs.run(variant).out
        made = like(variant)
        made = made.to(inputs.query.device, inputs.query.dtype)
        made.load_state_dict(variant.state_dict())
        others = {"deepcopy": copy.deepcopy(variant), "a new instance with its options and state_dict": made}
        if "<locals>" not in type(variant).__qualname__:  # a class in a function cannot be pickled by anyone
            others["pickle"] = pickle.loads(pickle.dumps(variant))
        for word, other in others.items():
            demand_close(
                inputs.run(other).out,
                expected,
                rounding_bound(
                    case.dtype, terms=reduction_terms(case), magnitude=max(largest(expected), largest(inputs.value))
                ),
                variant,
                case,
                what="out",
                versus=f"the original's ({word})",
                advice="Keep tensors in nn.Parameter or register_buffer, and every option in self.options",
            )


def check_recomputation_gives_the_same_gradients(variant: Any, case: Case) -> None:
    """Under torch.utils.checkpoint, dropout included, gradients are those of a plain run with the same seed."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)
    more = {"dropout_p": 0.4} if "dropout" in case.needs else {}
    with seeded_draws(6, case.device):
        _, expected = gradients(variant, inputs, direction, **more)
    with seeded_draws(6, case.device):
        found = _recomputed(variant, inputs, direction, more)
    for name, gradient in found.items():
        size = max(largest(expected[name]), largest(direction) * largest(inputs.value))
        demand_close(
            gradient,
            expected[name],
            rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus="the gradient without torch.utils.checkpoint",
            advice="Draw dropout from torch's default generator, and keep nothing between forward and backward",
        )


def check_gradients_reach_every_parameter(variant: Any, case: Case) -> None:
    """Each parameter that requires a gradient receives one that is not all zero."""
    inputs = draw(case, variant)
    _, found = gradients(variant, inputs, direction_for(inputs))
    for name in trained(variant):
        demand(
            bool(found[name].count_nonzero()),
            variant,
            case,
            f"parameter {name} receives no gradient",
            "Use it in the forward, or do not register it",
        )


def _recomputed(variant: Any, inputs: Inputs, direction: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
    leaves = recorded(inputs.tensors())

    def run(*tensors: Tensor) -> Tensor:
        out: Tensor = inputs.rebuilt(dict(zip(leaves, tensors, strict=True))).run(variant, **more).out
        return out

    with torch.enable_grad():
        out = checkpoint(run, *leaves.values(), use_reentrant=False)
        found = torch.autograd.grad(out, list(leaves.values()), direction, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _copies(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case("causal", "gqa", dtype=scope.base)


def _recomputing(scope: Scope) -> Iterable[Case]:
    for c in (case(dtype=scope.base), case("causal", dtype=scope.base)):
        yield replace(c, needs=("backward",))
        yield replace(c, needs=("backward", "dropout"), note="dropout")


def _plain(scope: Scope) -> Iterable[Case]:
    yield case(needs=("backward",), dtype=scope.base)


CHECKS = (
    Check(check_copies_agree, "modules", _copies, random_too=True),
    Check(check_recomputation_gives_the_same_gradients, "modules", _recomputing, random_too=True, slow=True),
    Check(check_gradients_reach_every_parameter, "modules", _plain, random_too=True),
)
