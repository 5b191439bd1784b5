"""Gradients where inputs are long, and where one tensor plays several roles. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnlab.conformance.checks._runs import agree, declared, differentiated
from attnlab.conformance.checks.extremes import banded, long_inputs
from attnlab.conformance.compare.messages import demand_close
from attnlab.conformance.compare.tolerances import bound, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import draw, plain_dtype, reduction_terms
from attnlab.conformance.oracle.sampling import defined_row_gradients, direction_of_rows, sampled_rows, visible_rows
from attnlab.conformance.running.check import Check, NotApplicable, Scope


def check_long_gradients_agree_by_rows(variant: Any, case: Case) -> None:
    """Past the tiles of every usual kernel: the gradients that rows at the borders ask for equal the definition's."""
    inputs, rows = long_inputs(variant, case), sampled_rows(case)
    direction, visible = direction_of_rows(inputs, rows), visible_rows(inputs, rows)
    low = plain_dtype(case.dtype)
    _, found = gradients(variant, inputs, direction)
    exact, plain = (
        defined_row_gradients(variant, inputs, rows, direction, visible, dtype)
        for dtype in (torch.float64, getattr(torch, low))
    )
    for name, expected in exact.items():
        limit = bound(
            case.dtype,
            exact=expected,
            plain=plain[name],
            plain_dtype=low,
            terms=reduction_terms(case) * (case.batch if expected.dim() < 4 else 1),
            magnitude=largest(direction) * largest(inputs.value),
        )
        demand_close(
            found[name],
            expected,
            limit,
            variant,
            case,
            what=f"gradient of {name}",
            versus=f"the definition's (rows {', '.join(map(str, rows))})",
            advice="Each tile's backward adds to what other tiles gave; the last partial tile and the skipped ones included",
        )


def check_one_tensor_may_play_every_role(variant: Any, case: Case) -> None:
    """Query, key and value that are one tensor get the output of three copies, and the sum of their gradients."""
    inputs = draw(case, variant)
    if len({inputs.query.shape, inputs.key.shape, inputs.value.shape}) > 1:
        raise NotApplicable("it cannot be made with query, key and value of one shape")
    x, direction = inputs.key, direction_for(inputs)
    copies = inputs.with_tensors(query=x.clone(), key=x.clone(), value=x.clone())
    out, apart = differentiated(variant, copies, {}, direction)
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        answer = inputs.with_tensors(query=leaf, key=leaf, value=leaf).run(variant).out
        (found,) = torch.autograd.grad(answer, [leaf], direction)
    advice = "Tell query, key and value apart by place, never by identity or address"
    agree(variant, copies, answer.detach(), out, versus="three copies of the tensor", advice=advice)
    agree(
        variant,
        copies,
        found,
        apart["query"] + apart["key"] + apart["value"],
        what="gradient of query",
        versus="the sum of the gradients of three copies",
        advice=advice,
    )


def _long(scope: Scope) -> Iterable[Case]:
    length = 200 if scope.stepwise else 1500
    sizes: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "needs": ("backward",)}
    sizes |= {"query_length": length, "key_length": length, "dtype": scope.precise}
    yield case(*declared(scope, "causal", "bias", "sinks"), **sizes)
    yield banded(scope, sizes)
    late = case(*declared(scope, "left_window", "softcap"), **sizes)
    yield replace(late, needs=("backward", "key_mask"), note="late keys")


def _alike(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",)):
        yield case(*labels, needs=("backward",), dtype=scope.base)


CHECKS = (
    Check(check_long_gradients_agree_by_rows, "gradients", _long, slow=True),
    Check(check_one_tensor_may_play_every_role, "gradients", _alike, random_too=True),
)
