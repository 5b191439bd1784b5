"""Gradients of a variant and of its definition, by name. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.features import normal
from attnlab.conformance.oracle.inputs import Inputs, define, parameters_of, rows_of
from attnlab.conformance.oracle.seeds import seeded_draws

Gradients = dict[str, Tensor]
Answer = tuple[Tensor, Gradients]
"""Out, and gradients by name."""


def direction_for(inputs: Inputs, rows: Sequence[int] | None = None) -> Tensor:
    """A fixed random gradient for `out`, in the case's dtype; 0 outside of `rows`, where they are stated."""
    case = inputs.case
    generator = torch.Generator().manual_seed(case.seed + 77)
    shape = (inputs.query.shape[0], case.num_heads, inputs.query.shape[2], case.value_dim)
    whole = normal(generator, *shape).to(inputs.query.device, inputs.query.dtype)
    if rows is None:
        return whole
    keep = torch.zeros(whole.shape[2], 1, dtype=torch.bool, device=whole.device)
    keep[list(rows)] = True
    return torch.where(keep, whole, 0)


def recorded(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Leaves with the same values that record gradients; strides are kept where the dtype is."""
    return {n: t.detach().clone().to(dtype or t.dtype).requires_grad_() for n, t in tensors.items()}


def trained(variant: Any) -> dict[str, Tensor]:
    """Its parameters that require a gradient, by name; frozen ones are constants."""
    return {name: p for name, p in variant.named_parameters() if p.requires_grad}


def slopes(out: Tensor, leaves: Mapping[str, Tensor], direction: Tensor | None = None, **more: Any) -> Gradients:
    """Gradients of sum(out * direction), or of a scalar out, by leaf; 0 for a leaf that out does not depend on."""
    grads = torch.autograd.grad(
        out, list(leaves.values()), direction, allow_unused=True, materialize_grads=True, **more
    )
    return dict(zip(leaves, grads, strict=True))


def gradients(variant: Any, inputs: Inputs, grad_out: Tensor, call: Any = None, **more: Any) -> Answer:
    """The variant's out, and the gradients of sum(out * grad_out) by input and parameter name.

    call: a function of the variant's signature in its place, such as the compiled variant.
    """
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        out = inputs.rebuilt(leaves).run(variant if call is None else call, **more).out
        return out.detach(), slopes(out, {**leaves, **trained(variant)}, grad_out)


def differentiated(variant: Any, inputs: Inputs, call: Any = None, direction: Tensor | None = None) -> Answer:
    """`gradients` along `direction_for(inputs)` unless stated; random numbers start from the case's seed, also in a `call`."""
    with seeded_draws(inputs.case.seed, inputs.case.device):
        return gradients(variant, inputs, direction_for(inputs) if direction is None else direction, call)


def defined_leaves(variant: Any, inputs: Inputs, dtype: torch.dtype) -> tuple[Inputs, dict[str, Tensor], Gradients]:
    """For the definition in `dtype`: inputs that record gradients, its parameters, and the leaves among both by name."""
    leaves, state = recorded(inputs.tensors(), dtype), parameters_of(variant, dtype)
    own = {n: state[n].clone().requires_grad_() for n in trained(variant)}
    return inputs.rebuilt(leaves), {**state, **own}, {**leaves, **own}


def defined_answer(
    variant: Any,
    inputs: Inputs,
    grad_out: Tensor,
    dtype: torch.dtype = torch.float64,
    visible: Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> Answer:
    """Out and the same gradients through the definition, everything in `dtype`; of some query rows, where they are stated."""
    require_exact(variant, inputs)
    call, parameters, leaves = defined_leaves(variant, inputs, dtype)
    with torch.enable_grad():
        out = define(variant, call, dtype=dtype, parameters=parameters, visible=visible, rows=rows)["out"]
        return out.detach(), slopes(out, leaves, (grad_out if rows is None else rows_of(grad_out, rows)).to(dtype))


def defined_gradients(variant: Any, inputs: Inputs, grad_out: Tensor, *how: Any) -> Gradients:
    """The gradients of `defined_answer`."""
    return defined_answer(variant, inputs, grad_out, *how)[1]
