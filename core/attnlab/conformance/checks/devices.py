"""Where a variant is made and where its tensors live: the meta device, and a default device that is not query's. Needs torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from attnlab.conformance.compare.comparer import drawn, short
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Answer, differentiated, direction_for
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, Scope
from attnlab.conformance.running.subject import like


def check_meta_initialisation_and_loading(variant: Any, case: Case) -> None:
    """Made on the meta device, then to_empty, reset_parameters and load_state_dict: the answer of one that was made at once."""
    inputs, compare = drawn(case, variant)
    expected = inputs.seeded_out(variant)
    rule = (
        "Make no decision from a tensor's value in __init__, and let reset_parameters() make again whatever the state_dict "
        "does not hold (tables in buffers with persistent=False)"
    )
    example = next(iter([*variant.parameters(), *variant.buffers()]), inputs.query)
    with seeded_draws(case.seed, case.device):
        try:
            with torch.device("meta"):
                made = type(variant)(**case.geometry, **variant.options)
        except Exception as fault:
            compare.fail(f"it cannot be made under torch.device('meta'): {type(fault).__name__}: {fault}", rule)
        made = made.to_empty(device=example.device)
        for x in [*made.parameters(), *made.buffers()]:  # what to_empty leaves is anything at all
            with torch.no_grad():
                x.fill_(float("nan") if x.is_floating_point() else 0)
        for module in reversed(list(made.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    made = made.to(example.device, example.dtype if example.is_floating_point() else inputs.query.dtype)
    made.load_state_dict(variant.state_dict())
    compare.same(inputs.seeded_out(made.eval()), expected, "that of the instance made at once", rule)


def check_runs_on_meta(variant: Any, case: Case) -> None:
    """Where the device meta is declared: shapes and dtypes without data, forward and backward."""
    inputs, compare = drawn(case, variant)
    moved = inputs.mapped(lambda x: x.to("meta"))
    expected = inputs.run(variant).out
    there = variant.to("meta")
    with contextlib.suppress(NotImplementedError):  # nothing to move where there is no tensor
        there = there.to(inputs.query.dtype)
    try:
        if variant.capabilities.backward:
            _, grads = differentiated(there, moved)
            wrong = [n for n, x in moved.tensors().items() if grads[n].shape != x.shape]
            compare.demand(not wrong, f"gradients of {wrong} have other shapes on meta", "Derive shapes only")
        got = moved.out(there)
    except (RuntimeError, NotImplementedError, ValueError) as fault:
        advice = "Read shapes and dtypes only, or do not declare the device meta"
        compare.fail(f"the call fails on meta: {type(fault).__name__}: {fault}", advice)
    right = (got.shape, got.dtype, got.device.type) == (expected.shape, expected.dtype, "meta")
    fault_ = f"out on meta is {list(got.shape)} {got.dtype} on {got.device}, expected "
    fault_ += f"{list(expected.shape)} {expected.dtype} on meta"
    compare.demand(right, fault_, "The same shapes on every device")


def check_tensors_are_created_on_the_device_of_query(variant: Any, case: Case) -> None:
    """Under another default device (torch.device("meta") as a context) a call gives what it gives without, and so do gradients."""
    inputs, compare = drawn(case, variant)
    advice = (
        "Give device=query.device to every tensor that is made in a call: without it the tensor is on the wrong device "
        "wherever query is not on the default one, a GPU say"
    )

    direction = direction_for(inputs)  # made under the usual default device

    def answer(one: Any) -> Answer:
        if "backward" in case.needs:
            return differentiated(one, inputs, direction=direction)
        return inputs.seeded_out(one), {}

    expected = answer(variant)
    with seeded_draws(case.seed, case.device):
        fresh = like(variant).to(inputs.query.device, inputs.query.dtype)  # which keeps no table of an earlier call
    try:
        with torch.device("meta"):
            got = answer(fresh)
    except (RuntimeError, NotImplementedError, ValueError) as fault:
        compare.fail(
            f"under torch.device('meta') as the default device, with all inputs on {case.device}, the call fails: "
            f"{type(fault).__name__}: {short(fault, 200)}",
            advice,
        )
    places = got[0].device, expected[0].device
    fault_ = f"out is on {places[0]} where the default device is meta and query is on {places[1]}"
    compare.demand(places[0] == places[1], fault_, advice)
    compare.same_answer(got, expected, "the call under the usual default device", advice)


def _made(scope: Scope) -> Iterable[Case]:
    return scope.usable(*(("",) if scope.quick else ("", "causal+gqa+value_dim")))


def _meta(scope: Scope) -> Iterable[Case]:
    if "meta" not in scope.capabilities.devices:
        return []
    labels = ("", "causal+gqa+key_mask_left+longer_keys", "mask_per_item+bias+segments")
    return scope.usable(*(labels[:2] if scope.quick else labels))


def _placed(scope: Scope) -> Iterable[Case]:
    backward = ("backward",) if scope.capabilities.backward else ()
    yield from scope.usable("causal+gqa+longer_keys")
    yield from scope.usable("causal+key_mask_left", needs=backward)
    yield from scope.usable("")
    if not scope.quick:
        yield from scope.usable("window+key_lengths+query_lengths")
        yield from scope.usable("mask_per_item+bias+softcap+sinks", needs=backward)
        yield from scope.usable("segments+score_mod", "batch_offset+mask_mod")
        yield from scope.usable("causal", query_length=70, key_length=70, needs=backward)


CHECKS = (
    Check(check_meta_initialisation_and_loading, "devices", _made, random_too=True, slow=True),
    Check(check_runs_on_meta, "devices", _meta, random_too=True),
    Check(check_tensors_are_created_on_the_device_of_query, "devices", _placed, random_too=True),
)
