"""Shapes, dtypes, ownership and empty sizes. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case, case, each
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.features import FEATURES
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, Scope
from attnlab.errors import UnsupportedRequest


def check_shapes_and_dtypes(variant: Any, case: Case) -> None:
    """out [B, Hq, Lq, Dv] in query's dtype and device; weights [B, Hq, Lq, Lk]; lse [B, Hq, Lq] in float32 or better."""
    inputs = draw(case, variant)
    have = variant.capabilities
    with torch.no_grad():
        answer = inputs.run(variant, need_weights=bool(have.weights), need_lse=bool(have.lse))
    rows = (case.batch, case.num_heads, case.query_length)
    expected = {"out": (*rows, case.value_dim), "weights": (*rows, case.key_length), "lse": rows}
    for what, shape in expected.items():
        got = getattr(answer, what)
        if what == "out" or getattr(have, what):
            demand(got is not None, variant, case, f"{what} was asked for and is None", "Return it in AttentionOutput")
            demand(
                tuple(got.shape) == shape,
                variant,
                case,
                f"{what} has shape {list(got.shape)}, expected {list(shape)}",
                "out is [B, Hq, Lq, Dv], weights [B, Hq, Lq, Lk], lse [B, Hq, Lq]",
            )
            demand(
                got.device == inputs.query.device,
                variant,
                case,
                f"{what} is on {got.device}, query on {inputs.query.device}",
                "Make it where query is",
            )
        else:
            demand(got is None, variant, case, f"{what} was not asked for and is not None", "Return None")
    demand(
        answer.out.dtype == inputs.query.dtype,
        variant,
        case,
        f"out has dtype {answer.out.dtype}, query {inputs.query.dtype}",
        "Cast the result back to query's dtype",
    )
    if answer.lse is not None:
        wanted = torch.float64 if case.dtype == "float64" else torch.float32
        demand(
            answer.lse.dtype in (wanted, torch.float64),
            variant,
            case,
            f"lse has dtype {answer.lse.dtype}, expected {wanted}",
            "Keep lse in float32 or better",
        )
    with torch.no_grad():
        bare = inputs.run(variant)
    demand(
        bare.weights is None and bare.lse is None and bare.state is None,
        variant,
        case,
        "weights, lse or state came back without being asked for",
        "Return None for what was not asked",
    )


def check_inputs_are_not_modified(variant: Any, case: Case) -> None:
    """Every tensor handed in holds afterwards, bit for bit, what it held before, and was not written to."""
    inputs = draw(case, variant)
    have = variant.capabilities
    given = _tensors_of(inputs)
    before = {n: (x.clone(), x._version) for n, x in given.items()}
    with torch.no_grad():
        inputs.run(variant, need_weights=bool(have.weights), need_lse=bool(have.lse))
    _demand_untouched(variant, case, given, before, "")
    kept = inputs.arguments.get("gates") or {}
    demand(
        all(kept.get(n.removeprefix("gates.")) is x for n, x in given.items() if n.startswith("gates."))
        and len(kept) == sum(n.startswith("gates.") for n in given),
        variant,
        case,
        "the caller's mapping of gates was changed",
        "Copy call.gates before changing it: {**call.gates, ...}",
    )
    if have.backward:
        leaves = recorded(inputs.tensors())
        given = {**leaves, "grad_out": direction_for(inputs)}
        before = {n: (x.detach().clone(), x._version) for n, x in given.items()}
        with torch.enable_grad():
            out = inputs.rebuilt(leaves).run(variant).out
            torch.autograd.grad(out, list(leaves.values()), given["grad_out"], allow_unused=True)
        _demand_untouched(variant, case, given, before, ", forward or backward, while gradients were recorded")


def _demand_untouched(
    variant: Any, case: Case, given: dict[str, Tensor], before: dict[str, tuple[Tensor, int]], when: str
) -> None:
    for name, x in given.items():
        old, version = before[name]
        demand(
            bool(torch.equal(x, old)) and x._version == version,
            variant,
            case,
            f"{name} was written to{when}",
            "Use out-of-place operations on inputs (x + y rather than x += y; masked_fill rather than masked_fill_)",
        )


def check_outputs_own_their_memory(variant: Any, case: Case) -> None:
    """Writing to out disturbs neither an input nor another element of out, and a later call disturbs no earlier output."""
    inputs = draw(case, variant)
    have = variant.capabilities
    asked = {f"need_{what}": True for what in ("weights", "lse") if getattr(have, what)}
    later = draw(replace(case, seed=case.seed + 4), variant)
    with torch.no_grad():
        out = inputs.run(variant).out
        answer = inputs.run(variant, **asked)
        kept = {w: (x, x.clone()) for w, x in answer._asdict().items() if isinstance(x, Tensor)}
        kept["out of the plain call"] = (out, out.clone())
        later.run(variant)
        later.run(variant, **asked)
    for what, (x, before) in kept.items():
        demand(
            bool(torch.equal(x, before)),
            variant,
            case,
            f"{what} changed when another call of that shape was made",
            "Allocate results for each call: a buffer that the module keeps is written over by the next one",
        )
    memory = out.untyped_storage().data_ptr()
    for name, x in _tensors_of(inputs).items():
        demand(
            x.untyped_storage().data_ptr() != memory or not x.numel(),
            variant,
            case,
            f"out shares its memory with {name}",
            "Return a tensor of its own (clone() where the result is a view of an input)",
        )
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True))
    demand(
        not overlapping,
        variant,
        case,
        f"elements of out share memory: shape {list(out.shape)}, strides {list(out.stride())}",
        "An expanded result must be made contiguous",
    )


def check_empty_sizes(variant: Any, case: Case) -> None:
    """With B, Lq or Lk = 0, out is 0, weights are 0, lse is -inf, all of their shapes, and gradients flow and are 0."""
    inputs = draw(case, variant)
    have = variant.capabilities
    differentiable = have.backward
    tensors = inputs.tensors()
    if differentiable:
        tensors = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    with torch.set_grad_enabled(differentiable):
        answer = inputs.rebuilt(tensors).run(variant)
    try:
        with torch.no_grad():
            shown = inputs.run(variant, need_weights=bool(have.weights), need_lse=bool(have.lse))
    except UnsupportedRequest:  # weights or lse beside the case's features, a combination that may be refused
        shown = None
    rows = (case.batch, case.num_heads, case.query_length)
    shapes = {"out": (*rows, case.value_dim), "weights": (*rows, case.key_length), "lse": rows}
    wanted = [("out", answer.out)]
    if shown is not None:
        wanted += [("out", shown.out)]
        wanted += [(what, getattr(shown, what)) for what in ("weights", "lse") if getattr(have, what)]
    for what, got in wanted:
        demand(
            got is not None and tuple(got.shape) == shapes[what],
            variant,
            case,
            f"{what} has shape {None if got is None else list(got.shape)}, expected {list(shapes[what])}",
            "An empty input has an empty (or zero) output of the usual shape",
        )
        nothing = -torch.inf if what == "lse" else 0.0
        demand(
            bool((got.detach() == nothing).all()),
            variant,
            case,
            f"{what} is not {nothing} although no query sees a key",
            "The sum over no keys is 0, and its logarithm -inf",
        )
    if not differentiable:
        return
    answer.out.sum().backward()
    for name, x in tensors.items():
        if x.grad is not None:
            demand(
                x.grad.shape == x.shape and not bool(x.grad.count_nonzero()),
                variant,
                case,
                f"the gradient of {name} is not 0 (or has another shape) although no query sees a key",
                "It is 0 or empty",
            )


def _tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    found = dict(inputs.tensors())
    for name, x in inputs.arguments.items():
        for i, part in enumerate(x if isinstance(x, tuple) else (x,)):
            if isinstance(part, Tensor):
                found.setdefault(name if part is x else f"{name}[{i}]", part)
    return found


def _every_argument(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield from each(*FEATURES, dtype=scope.base)
    yield from (case(dtype=d) for d in scope.dtypes if d != scope.base)


def _ownership(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case(dtype=scope.base, query_length=1, key_length=1, note="one token")
    yield case(dtype=scope.base, batch=1, num_heads=1, num_kv_heads=1, query_length=1, key_length=1, note="one of all")
    yield case("causal", "gqa", dtype=scope.base)


def _empty(scope: Scope) -> Iterable[Case]:
    labels = [(), ("causal",), ("bias",)]
    if not scope.quick:
        labels += [
            (x,) for x in ("mask", "key_mask_right", "segments", "sinks", "left_window", "mask_mod", "score_mod")
        ]
    for one in labels:
        yield case(*one, dtype=scope.base, batch=0, note="B=0")
        yield case(*one, dtype=scope.base, query_length=0, key_length=0, note="L=0")
        yield case(*one, dtype=scope.base, query_length=0, note="Lq=0")
        yield case(*one, dtype=scope.base, key_length=0, note="Lk=0")
    yield from (case("gqa", dtype=d, batch=0, note="B=0") for d in scope.dtypes)


CHECKS = (
    Check(check_shapes_and_dtypes, "layout", _every_argument, asks_more=True, random_too=True),
    Check(check_inputs_are_not_modified, "layout", _every_argument, asks_more=True, random_too=True),
    Check(check_outputs_own_their_memory, "layout", _ownership, random_too=True),
    Check(check_empty_sizes, "layout", _empty, random_too=True),
)
