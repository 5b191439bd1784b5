"""Gradients through weights and lse. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.weights import require_defined
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import bound, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, recorded, trained
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, draw, parameters_of, plain_dtype, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_gradients_flow_through_weights(variant: Any, case: Case) -> None:
    """Weights declared `in_graph` have the definition's gradients, by input and by parameter.

    `NotApplicable` where the definition's weights depend on neither, as those of fixed places do.
    """
    if variant.capabilities.weights != "in_graph":
        raise NotApplicable(f"weights are {variant.capabilities.weights!r}, only 'in_graph' promises gradients")
    inputs = draw(case, variant)
    require_exact(variant, inputs)
    generator = torch.Generator().manual_seed(case.seed + 3)
    shape = (case.batch, case.num_heads, case.query_length, case.key_length)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.device)
    visible = inputs.visible()

    def through(dtype: torch.dtype, judged: bool) -> dict[str, torch.Tensor]:
        leaves, own, state = _leaves(variant, inputs, dtype, judged)
        with torch.enable_grad():
            call = inputs.rebuilt(leaves)
            weights = (
                call.run(variant, need_weights=True).weights
                if judged
                else define(variant, call, dtype=dtype, visible=visible, parameters=state)["weights"]
            )
            if not judged and not weights.requires_grad:
                raise NotApplicable("its definition's weights depend on no input and no parameter")
            demand(
                weights is not None and weights.requires_grad,
                variant,
                case,
                "weights carry no gradient",
                "Return the weights of the forward itself, or declare weights='recomputed'",
            )
            grads = torch.autograd.grad(
                weights,
                [*leaves.values(), *own.values()],
                direction.to(weights.dtype),
                allow_unused=True,
                materialize_grads=True,
            )
        return dict(zip([*leaves, *own], grads, strict=True))

    low = plain_dtype(case.dtype)
    exact, plain = through(torch.float64, False), through(getattr(torch, low), False)
    found = through(inputs.query.dtype, True)
    for name, expected in exact.items():
        limit = bound(
            case.dtype,
            exact=expected,
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case) * (case.batch if expected.dim() < 4 else 1),
            magnitude=largest(direction),
        )
        demand_close(
            found[name],
            expected,
            limit,
            variant,
            case,
            what=f"gradient through weights of {name}",
            versus="the definition's",
            advice="Do not detach the weights that are returned",
        )


def check_gradients_flow_through_lse(variant: Any, case: Case) -> None:
    """Where lse carries a gradient it is the definition's, alone and together with out's, as merging partial results needs it."""
    inputs = draw(case, variant)
    require_exact(variant, inputs)
    require_defined(variant, "lse", define(variant, inputs))
    direction = direction_for(inputs)
    lean = direction.sum(-1) * inputs.visible().any(-1)  # lse of a row that sees nothing is a constant
    visible = inputs.visible()

    def through(dtype: torch.dtype, judged: bool) -> dict[str, torch.Tensor]:
        leaves, own, state = _leaves(variant, inputs, dtype, judged)
        call = inputs.rebuilt(leaves)
        with torch.enable_grad():
            if judged:
                answer = call.run(variant, need_lse=True)
                out, lse = answer.out, answer.lse
                if not lse.requires_grad:
                    raise NotApplicable("its lse carries no gradient")
            else:
                defined = define(variant, call, dtype=dtype, visible=visible, parameters=state)
                out, lse = defined["out"], defined["lse"]
            loss = (torch.where(lean == 0, 0, lse) * lean.to(lse.dtype)).sum()
            loss = loss + (out * direction.to(out.dtype)).sum().to(lse.dtype)
            found = torch.autograd.grad(
                loss, [*leaves.values(), *own.values()], allow_unused=True, materialize_grads=True
            )
        return dict(zip([*leaves, *own], found, strict=True))

    low = plain_dtype(case.dtype)
    found = through(inputs.query.dtype, True)
    exact, plain = through(torch.float64, False), through(getattr(torch, low), False)
    for name, expected in exact.items():
        limit = bound(
            case.dtype,
            exact=expected,
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case) * (case.batch if expected.dim() < 4 else 1),
            magnitude=max(largest(lean), largest(direction) * largest(inputs.value)),
        )
        demand_close(
            found[name],
            expected,
            limit,
            variant,
            case,
            what=f"gradient of {name}",
            versus="the definition's, of a loss on out and lse",
            advice="d lse / d score is the weight: a backward of its own adds it, or marks lse as not differentiable",
        )


def _leaves(
    variant: Any, inputs: Inputs, dtype: torch.dtype, judged: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Inputs that record gradients, the trained parameters of the variant or of its definition, and all that the latter is given."""
    leaves = recorded(inputs.tensors(), dtype)
    if judged:
        return leaves, trained(variant), {}
    state = parameters_of(variant, dtype)
    own = {n: state[n].clone().requires_grad_() for n in trained(variant)}
    return leaves, own, {**state, **own}


def _through(scope: Scope) -> Iterable[Case]:
    for labels in (
        (),
        ("causal",),
        ("gqa",),
        ("hiding_bias",),
        ("mask_of_each", "sinks"),
        ("bias_of_each", "softcap", "key_mask_left"),
    ):
        yield case(*declared(scope, *labels), needs=("weights", "backward"), dtype=scope.base)


def _lse(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"needs": ("lse", "backward"), "dtype": scope.base}
    for labels in ((), ("causal",), ("mask", "sinks"), ("bias", "softcap", "gqa")):
        yield case(*declared(scope, *labels), **sizes)
    yield case(*declared(scope, "causal"), **sizes, batch=1, query_length=70, key_length=70)


CHECKS = (
    Check(check_gradients_flow_through_weights, "weights", _through),
    Check(check_gradients_flow_through_lse, "weights", _lse),
)
