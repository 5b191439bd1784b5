"""Shapes, dtypes, strides, ownership and empty sizes. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.oracle.cases import Case, case, each
from attnlab.conformance.oracle.derivatives import direction_for, recorded
from attnlab.conformance.oracle.features import LAYOUTS, swapped
from attnlab.conformance.oracle.inputs import MAIN, Inputs, draw
from attnlab.conformance.running.check import Check, Scope, small
from attnlab.errors import UnsupportedRequest


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    rows = (case.batch, case.num_heads, case.query_length)
    return {"out": (*rows, case.value_dim), "weights": (*rows, case.key_length), "lse": rows}


def _everything(variant: Any) -> dict[str, bool]:
    """Requests for weights and lse, as far as they are declared."""
    have = variant.capabilities
    return {"need_weights": bool(have.weights), "need_lse": bool(have.lse)}


def check_shapes_and_dtypes(variant: Any, case: Case) -> None:
    """out [B, Hq, Lq, Dv] in query's dtype and device; weights [B, Hq, Lq, Lk]; lse [B, Hq, Lq] in float32 or better."""
    inputs, compare = drawn(case, variant)
    demand, query = compare.demand, inputs.query
    answer = inputs.answer(variant, **_everything(variant))
    for what, shape in _shapes(case).items():
        got = getattr(answer, what)
        if what == "out" or getattr(variant.capabilities, what):
            demand(got is not None, f"{what} was asked for and is None", "Return it in AttentionOutput")
            fault = f"{what} has shape {list(got.shape)}, expected {list(shape)}"
            advice = "out is [B, Hq, Lq, Dv], weights [B, Hq, Lq, Lk], lse [B, Hq, Lq]"
            demand(tuple(got.shape) == shape, fault, advice)
            fault = f"{what} is on {got.device}, query on {query.device}"
            demand(got.device == query.device, fault, "Make it where query is")
        else:
            demand(got is None, f"{what} was not asked for and is not None", "Return None")
    fault = f"out has dtype {answer.out.dtype}, query {query.dtype}"
    demand(answer.out.dtype == query.dtype, fault, "Cast the result back to query's dtype")
    if answer.lse is not None:
        least = torch.float64 if case.dtype == "float64" else torch.float32
        fault = f"lse has dtype {answer.lse.dtype}, expected {least}"
        demand(answer.lse.dtype in (least, torch.float64), fault, "Keep lse in float32 or better")
    bare = inputs.answer(variant)
    none = bare.weights is None and bare.lse is None and bare.state is None
    demand(none, "weights, lse or state came back without being asked for", "Return None for what was not asked")


def check_inputs_are_not_modified(variant: Any, case: Case) -> None:
    """Every tensor handed in holds afterwards, bit for bit, what it held before, and was not written to."""
    inputs, compare = drawn(case, variant)
    tensors = _tensors_of(inputs)
    before = _snapshot(tensors)
    inputs.answer(variant, **_everything(variant))
    _demand_untouched(compare, tensors, before, "")
    mapping = inputs.arguments.get("gates") or {}
    gates = {n.removeprefix("gates."): x for n, x in tensors.items() if n.startswith("gates.")}
    compare.demand(
        all(mapping.get(n) is x for n, x in gates.items()) and len(mapping) == len(gates),
        "the caller's mapping of gates was changed",
        "Copy call.gates before changing it: {**call.gates, ...}",
    )
    if variant.capabilities.backward:
        leaves = recorded(inputs.tensors())
        tensors = {**leaves, "grad_out": direction_for(inputs)}
        before = _snapshot(tensors)
        with torch.enable_grad():
            out = inputs.rebuilt(leaves).run(variant).out
            torch.autograd.grad(out, list(leaves.values()), tensors["grad_out"], allow_unused=True)
        _demand_untouched(compare, tensors, before, ", forward or backward, while gradients were recorded")


def _snapshot(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {n: (x.detach().clone(), x._version) for n, x in tensors.items()}


def _demand_untouched(
    compare: Comparer, tensors: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor, int]], when: str
) -> None:
    for name, x in tensors.items():
        old, version = before[name]
        compare.demand(
            bool(torch.equal(x, old)) and x._version == version,
            f"{name} was written to{when}",
            "Use out-of-place operations on inputs (x + y rather than x += y; masked_fill rather than masked_fill_)",
        )


def check_outputs_own_their_memory(variant: Any, case: Case) -> None:
    """Writing to out disturbs neither an input nor another element of out, and a later call disturbs no earlier output."""
    inputs, compare = drawn(case, variant)
    features = {f"need_{what}": True for what in ("weights", "lse") if getattr(variant.capabilities, what)}
    later = draw(replace(case, seed=case.seed + 4), variant)
    out, answer = inputs.out(variant), inputs.answer(variant, **features)
    results = {w: (x, x.clone()) for w, x in answer._asdict().items() if isinstance(x, Tensor)}
    results["out of the plain call"] = (out, out.clone())
    later.answer(variant)
    later.answer(variant, **features)
    for what, (x, before) in results.items():
        compare.demand(
            bool(torch.equal(x, before)),
            f"{what} changed when another call of that shape was made",
            "Allocate results for each call: a buffer that the module keeps is written over by the next one",
        )
    memory = out.untyped_storage().data_ptr()
    for name, x in _tensors_of(inputs).items():
        apart = x.untyped_storage().data_ptr() != memory or not x.numel()
        advice = "Return a tensor of its own (clone() where the result is a view of an input)"
        compare.demand(apart, f"out shares its memory with {name}", advice)
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True))
    fault = f"elements of out share memory: shape {list(out.shape)}, strides {list(out.stride())}"
    compare.demand(not overlapping, fault, "An expanded result must be made contiguous")


def check_empty_sizes(variant: Any, case: Case) -> None:
    """With B, Lq or Lk = 0, out is 0, weights are 0, lse is -inf, all of their shapes, and gradients flow and are 0."""
    inputs, compare = drawn(case, variant)
    have = variant.capabilities
    tensors = recorded(inputs.tensors()) if have.backward else inputs.tensors()
    with torch.set_grad_enabled(have.backward):
        answer = inputs.rebuilt(tensors).run(variant)
    results = [("out", answer.out)]
    try:
        whole = inputs.answer(variant, **_everything(variant))
        results += [("out", whole.out)]
        results += [(what, getattr(whole, what)) for what in ("weights", "lse") if getattr(have, what)]
    except UnsupportedRequest:  # weights or lse beside the case's features, a combination that may be refused
        pass
    for what, got in results:
        shape = _shapes(case)[what]
        compare.demand(
            got is not None and tuple(got.shape) == shape,
            f"{what} has shape {None if got is None else list(got.shape)}, expected {list(shape)}",
            "An empty input has an empty (or zero) output of the usual shape",
        )
        nothing = -torch.inf if what == "lse" else 0.0
        fault = f"{what} is not {nothing} although no query sees a key"
        advice = "The sum over no keys is 0, and its logarithm -inf"
        compare.demand(bool((got.detach() == nothing).all()), fault, advice)
    if have.backward:
        answer.out.sum().backward()
        for name, grad in ((name, x.grad) for name, x in tensors.items() if x.grad is not None):
            fault = f"the gradient of {name} is not 0 (or has another shape) although no query sees a key"
            right = grad.shape == tensors[name].shape and not bool(grad.count_nonzero())
            compare.demand(right, fault, "It is 0 or empty")


def _tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    tensors = dict(inputs.tensors())
    for name, x in inputs.arguments.items():
        for i, part in enumerate(x if isinstance(x, tuple) else (x,)):
            if isinstance(part, Tensor):
                tensors.setdefault(name if part is x else f"{name}[{i}]", part)
    return tensors


def check_strides_do_not_matter(variant: Any, case: Case) -> None:
    """Transposed, sliced and expanded query, key, value, mask and bias give what contiguous copies give."""
    inputs, compare = drawn(case, variant)
    for kind, changed in _strided(inputs):
        contiguous = changed.mapped(lambda x: x.contiguous().clone())
        versus = f"the same call with contiguous copies ({kind})"
        advice = "Read every operand through its own strides, or call .contiguous() on it first"
        compare.same(changed.out(variant), contiguous.out(variant), versus, advice)


def _overlapping(x: Tensor) -> Tensor:
    """Each token's vector begins with the second half of the one before it."""
    batch, heads, length, width = x.shape
    step = max(1, width // 2)
    line = x.new_empty(batch, heads, (length - 1) * step + width)
    line[..., :width], line[..., width:] = x[:, :, 0], x[:, :, 1:, :step].flatten(2)
    return line.unfold(2, width, step)


STRIDES = {
    **{name: one.layout for name, one in LAYOUTS.items()},
    "batch-expanded": lambda x: x[:1].expand(x.shape[0], -1, -1, -1),
    "head-expanded": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "overlapping": _overlapping,
}


def _strided(inputs: Inputs) -> Iterable[tuple[str, Inputs]]:
    """Calls whose operands have other strides, by what is unusual about them."""
    for kind, change in STRIDES.items():
        yield f"{kind} query, key, value", inputs.changed(change, *MAIN)
        for name in MAIN:
            yield f"{kind} {name}", inputs.changed(change, name)
    if inputs.key.shape == inputs.value.shape:
        key, value = swapped(torch.cat([inputs.key, inputs.value], -1), 1, 2).chunk(2, -1)
        yield "packed key and value", inputs.with_tensors(key=key, value=value)
    for name in ("mask", "bias"):
        x = inputs.arguments.get(name)
        if isinstance(x, Tensor):
            four = x if x.dim() == 4 else x[None, None]
            for kind, changed in (
                ("transposed", swapped(x, -1, -2)),
                ("row-expanded", four[..., :1, :].expand(-1, -1, four.shape[2], -1)),
                ("key-expanded", four[..., :1].expand(-1, -1, -1, four.shape[3])),
                ("batch-expanded", four[:1].expand(inputs.query.shape[0], -1, -1, -1)),
            ):
                yield f"{kind} {name}", inputs.with_tensors(**{name: changed})
    for name in ("sinks", "key_mask"):
        x = inputs.arguments.get(name)
        if isinstance(x, Tensor):
            yield f"strided {name}", inputs.with_tensors(**{name: x.repeat_interleave(2, -1)[..., ::2]})
            yield f"expanded {name}", inputs.with_tensors(**{name: x[:1].expand(x.shape)})
    gates = [name for name in inputs.tensors() if name.startswith("gates.")]
    if gates:
        yield "transposed gates", inputs.changed(lambda x: swapped(x, 1, 2), *gates)


def _every_argument(scope: Scope) -> Iterable[Case]:
    yield from scope.requests(without=("contents", "layout"), change=small, full=60, quick=16, seed=17000)
    yield from (case(dtype=d) for d in scope.dtypes)


def _ownership(scope: Scope) -> Iterable[Case]:
    token = {"query_length": 1, "key_length": 1}
    yield from scope.cases("")
    yield from scope.cases("", **token, note="one token")
    yield from scope.cases("", **token, batch=1, num_heads=1, num_kv_heads=1, note="one of all")
    yield from scope.requests(without=("contents", "layout"), change=small, full=20, quick=4, seed=18000)


def _empty(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, dict[str, Any]] = {
        "B=0": {"batch": 0},
        "L=0": {"query_length": 0, "key_length": 0},
        "Lq=0": {"query_length": 0},
        "Lk=0": {"key_length": 0},
    }
    arguments = scope.requests(without=("contents", "layout", "offset"), full=24, quick=4, seed=19000)
    for one in (*scope.cases("", "causal"), *arguments):
        yield from (replace(one, note=note, seed=0, **size) for note, size in sizes.items())
    yield from (c for d in scope.dtypes for c in each("gqa", dtype=d, batch=0, note="B=0"))


def _stride_cases(scope: Scope) -> Iterable[Case]:
    yield from scope.requests(without=("contents", "layout"), change=small, full=20, quick=5, seed=20000)
    yield from (case(dtype=d) for d in scope.dtypes)


CHECKS = (
    Check(check_shapes_and_dtypes, "layout", _every_argument, asks_more=True, random_too=True),
    Check(check_inputs_are_not_modified, "layout", _every_argument, asks_more=True, random_too=True),
    Check(check_outputs_own_their_memory, "layout", _ownership, random_too=True),
    Check(check_empty_sizes, "layout", _empty, random_too=True),
    Check(check_strides_do_not_matter, "layout", _stride_cases, random_too=True),
)
