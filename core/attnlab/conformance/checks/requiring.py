"""Who needs a gradient changes nothing but who receives one. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from attnlab.conformance.checks._runs import agree, declared, differentiated
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, trained
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import Check, Scope


def check_a_gradient_is_the_same_alone(variant: Any, case: Case) -> None:
    """Each input's and each parameter's gradient is the same where nothing else needs one, and so is the output."""
    inputs = draw(case, variant)
    parameters = trained(variant)
    direction = direction_for(inputs)
    out, together = differentiated(variant, inputs, parameters, direction)
    tensors = {n: x.detach().clone() for n, x in inputs.tensors().items()}
    advice = "Judge each input's need by its own ctx.needs_input_grad entry, and choose no path by who needs a gradient"
    try:
        for name, expected in together.items():
            for other, parameter in parameters.items():
                parameter.requires_grad_(other == name)
            leaf = parameters[name] if name in parameters else tensors[name].clone().requires_grad_()
            given = tensors if name in parameters else {**tensors, name: leaf}
            with torch.enable_grad(), seeded_draws(case.seed, case.device):
                answer = inputs.rebuilt(given).run(variant).out
            if not answer.requires_grad:
                demand(
                    not bool(expected.count_nonzero()),
                    variant,
                    case,
                    f"where only {name} needs a gradient, out is detached",
                    advice,
                )
                continue
            (found,) = torch.autograd.grad(answer, [leaf], direction, allow_unused=True, materialize_grads=True)
            versus = f"the one of a call where everything needs a gradient (here only {name} does)"
            agree(variant, inputs, answer.detach(), out, versus=versus, advice=advice)
            agree(variant, inputs, found, expected, what=f"gradient of {name}", versus=versus, advice=advice)
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(True)


def _alone(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base, "needs": ("backward",)}
    yield case(*declared(scope, "causal", "bias"), **sizes)
    if not scope.quick:
        yield case(**sizes)
        yield case(*declared(scope, "mask", "sinks", "softcap", "gqa"), **sizes)
        yield case(*declared(scope, "causal", "key_mask_left"), **sizes, query_length=70, key_length=70)


CHECKS = (Check(check_a_gradient_is_the_same_alone, "gradients", _alone, random_too=True),)
