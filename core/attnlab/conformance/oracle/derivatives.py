"""Gradients of a variant and of its definition, by name. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.features import normal
from attnlab.conformance.oracle.inputs import Inputs, define, parameters_of

Gradients = dict[str, Tensor]


def direction_for(inputs: Inputs) -> Tensor:
    """A fixed random gradient for `out`, in the case's dtype."""
    case = inputs.case
    generator = torch.Generator().manual_seed(case.seed + 77)
    shape = (inputs.query.shape[0], case.num_heads, inputs.query.shape[2], case.value_dim)
    return normal(generator, *shape).to(inputs.query.device, inputs.query.dtype)


def recorded(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Leaves with the same values that record gradients; strides are kept where the dtype is."""
    return {n: t.detach().clone().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def trained(variant: Any) -> dict[str, Tensor]:
    """Its parameters that require a gradient, by name; frozen ones are constants."""
    return {name: p for name, p in variant.named_parameters() if p.requires_grad}


def gradients(variant: Any, inputs: Inputs, grad_out: Tensor, **more: Any) -> tuple[Tensor, Gradients]:
    """The variant's out, and the gradients of sum(out * grad_out) by input and parameter name."""
    leaves = recorded(inputs.tensors())
    parameters = trained(variant)
    with torch.enable_grad():
        out = inputs.rebuilt(leaves).run(variant, **more).out
        found = torch.autograd.grad(
            out, [*leaves.values(), *parameters.values()], grad_out, allow_unused=True, materialize_grads=True
        )
    return out.detach(), dict(zip([*leaves, *parameters], found, strict=True))


def defined_gradients(
    variant: Any, inputs: Inputs, grad_out: Tensor, dtype: torch.dtype = torch.float64, visible: Tensor | None = None
) -> Gradients:
    """The same gradients through the definition, everything in `dtype`."""
    require_exact(variant, inputs)
    leaves = recorded(inputs.tensors(), dtype)
    names = trained(variant)
    state = parameters_of(variant, dtype)
    parameters = {n: state[n].clone().requires_grad_() for n in state if n in names}
    with torch.enable_grad():
        out = define(variant, inputs.rebuilt(leaves), dtype=dtype, parameters={**state, **parameters}, visible=visible)[
            "out"
        ]
        found = torch.autograd.grad(
            out, [*leaves.values(), *parameters.values()], grad_out.to(dtype), allow_unused=True, materialize_grads=True
        )
    return dict(zip([*leaves, *parameters], found, strict=True))
