"""Where a variant is made and where its tensors live: the meta device, and a default device that is not query's. Needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._runs import agree, agree_in_all, declared, differentiated, plainly
from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, trained
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like


def check_made_on_meta_and_loaded(variant: Any, case: Case) -> None:
    """Made on the meta device, then to_empty, reset_parameters and load_state_dict: the answer of one that was made at once."""
    inputs = draw(case, variant)
    expected = plainly(variant, inputs)
    rule = (
        "Make no decision from a tensor's value in __init__, and let reset_parameters() make again whatever the state_dict "
        "does not hold (tables in buffers with persistent=False)"
    )
    held = next(iter([*variant.parameters(), *variant.buffers()]), inputs.query)
    with seeded_draws(case.seed, case.device):
        try:
            with torch.device("meta"):
                made = type(variant)(**case.geometry, **variant.options)
        except Exception as fault:
            what = f"it cannot be made under torch.device('meta'): {type(fault).__name__}: {fault}"
            demand(False, variant, case, what, rule)
        made = made.to_empty(device=held.device)
        for x in [*made.parameters(), *made.buffers()]:  # what to_empty leaves is anything at all
            with torch.no_grad():
                x.fill_(float("nan") if x.is_floating_point() else 0)
        for module in reversed(list(made.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    made = made.to(held.device, held.dtype if held.is_floating_point() else inputs.query.dtype)
    made.load_state_dict(variant.state_dict())
    got = plainly(made.eval(), inputs)
    agree(variant, inputs, got, expected, versus="that of the instance made at once", advice=rule)


def check_runs_on_meta(variant: Any, case: Case) -> None:
    """Where the device meta is declared: shapes and dtypes without data, forward and backward."""
    inputs = draw(case, variant)
    placed = {n: _on_meta(x) for n, x in inputs.arguments.items()}
    moved = inputs.with_tensors(
        query=inputs.query.to("meta"), key=inputs.key.to("meta"), value=inputs.value.to("meta"), **placed
    )
    expected = inputs.run(variant).out
    there = variant.to("meta")
    with contextlib.suppress(NotImplementedError):  # nothing to move where there is no tensor
        there = there.to(inputs.query.dtype)
    got = None
    try:
        if variant.capabilities.backward:
            _, gradients = differentiated(there, moved, trained(there))
            wrong = [n for n, x in moved.tensors().items() if gradients[n].shape != x.shape]
            demand(not wrong, variant, case, f"gradients of {wrong} have other shapes on meta", "Derive shapes only")
        with torch.no_grad():
            got = moved.run(there).out
    except (RuntimeError, NotImplementedError, ValueError) as fault:
        demand(
            False,
            variant,
            case,
            f"the call fails on meta: {type(fault).__name__}: {fault}",
            "Read shapes and dtypes only, or do not declare the device meta",
        )
    assert got is not None
    facts = (got.shape, got.dtype, got.device.type)
    demand(
        facts == (expected.shape, expected.dtype, "meta"),
        variant,
        case,
        f"out on meta is {list(got.shape)} {got.dtype} on {got.device}, expected {list(expected.shape)} {expected.dtype} "
        "on meta",
        "The same shapes on every device",
    )


def check_tensors_are_made_where_query_is(variant: Any, case: Case) -> None:
    """Under another default device (torch.device("meta") as a context) a call gives what it gives without, and so do gradients."""
    inputs = draw(case, variant)
    recording = "backward" in case.needs
    advice = (
        "Give device=query.device to every tensor that is made in a call: without it the tensor is on the wrong device "
        "wherever query is not on the default one, a GPU say"
    )
    direction = direction_for(inputs)

    def answer(one: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if recording:
            return differentiated(one, inputs, trained(one), direction)
        return plainly(one, inputs), {}

    expected = answer(variant)
    with seeded_draws(case.seed, case.device):
        fresh = like(variant).to(inputs.query.device, inputs.query.dtype)  # which keeps no table of an earlier call
    try:
        with torch.device("meta"):
            got = answer(fresh)
    except (RuntimeError, NotImplementedError, ValueError) as fault:
        demand(
            False,
            variant,
            case,
            f"under torch.device('meta') as the default device, with all inputs on {case.device}, the call fails: "
            f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}",
            advice,
        )
    demand(
        got[0].device == expected[0].device,
        variant,
        case,
        f"out is on {got[0].device} where the default device is meta and query is on {expected[0].device}",
        advice,
    )
    agree_in_all(variant, inputs, got, expected, versus="the call under the usual default device", advice=advice)


def _on_meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to("meta")
    if isinstance(x, tuple):
        return tuple(_on_meta(part) for part in x)
    return {n: _on_meta(part) for n, part in x.items()} if isinstance(x, dict) else x


def _made(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    if not scope.quick:
        yield case(*declared(scope, "causal", "gqa", "value_dim"), dtype=scope.base)


def _meta(scope: Scope) -> Iterable[Case]:
    if "meta" not in scope.capabilities.devices:
        return
    yield case(dtype=scope.base)
    yield case(*declared(scope, "causal", "gqa", "key_mask_left", "longer_keys"), dtype=scope.base)
    if not scope.quick:
        yield case(*declared(scope, "mask_per_item", "bias", "segments"), dtype=scope.base)


def _placed(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base}
    backward = ("backward",) if scope.capabilities.backward else ()
    yield case(*declared(scope, "causal", "gqa", "longer_keys"), **sizes)
    yield case(*declared(scope, "causal", "key_mask_left"), **sizes, needs=backward)
    yield case(**sizes)
    if scope.quick:
        return
    yield case(*declared(scope, "window", "key_lengths", "query_lengths"), **sizes)
    yield case(*declared(scope, "mask_per_item", "bias", "softcap", "sinks"), **sizes, needs=backward)
    yield case(*declared(scope, "segments", "score_mod"), **sizes)
    yield case(*declared(scope, "batch_offset", "mask_mod"), **sizes)
    yield case(*declared(scope, "causal"), **sizes, query_length=70, key_length=70, needs=backward)


CHECKS = (
    Check(check_made_on_meta_and_loaded, "devices", _made, random_too=True, slow=True),
    Check(check_runs_on_meta, "devices", _meta, random_too=True),
    Check(check_tensors_are_made_where_query_is, "devices", _placed, random_too=True),
)
