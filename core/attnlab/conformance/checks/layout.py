"""Shapes, dtypes, strides, ownership and empty sizes. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.cases import Case, case, each
from attnlab.conformance.check import Check, Scope
from attnlab.conformance.features import FEATURES
from attnlab.conformance.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.messages import demand, demand_close, demand_finite
from attnlab.conformance.tolerances import largest, rounding_bound


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
            demand(
                got is not None,
                variant,
                case,
                f"{what} was asked for and is None",
                "Return it in AttentionOutput",
            )
            demand(
                tuple(got.shape) == shape,
                variant,
                case,
                f"{what} has shape {list(got.shape)}, expected {list(shape)}",
                "See CONTRACT section 1",
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


def check_strides_do_not_matter(variant: Any, case: Case) -> None:
    """Transposed, sliced and expanded query, key, value, mask and bias give what contiguous copies give."""
    inputs = draw(case, variant)
    for kind, changed in _strided(inputs):
        with torch.no_grad():
            expected, got = _contiguous(changed).run(variant).out, changed.run(variant).out
        limit = rounding_bound(
            case.dtype, terms=reduction_terms(case), magnitude=max(largest(expected), largest(inputs.value))
        )
        demand_close(
            got,
            expected,
            limit,
            variant,
            case,
            what="out",
            versus=f"the same call with contiguous copies ({kind})",
            advice="Read every operand through its own strides, or call .contiguous() on it first",
        )


def check_inputs_are_not_modified(variant: Any, case: Case) -> None:
    """Every tensor handed in holds afterwards, bit for bit, what it held before, and was not written to."""
    inputs = draw(case, variant)
    have = variant.capabilities
    given = _tensors_of(inputs)
    before = {n: (x.clone(), x._version) for n, x in given.items()}
    with torch.no_grad():
        inputs.run(variant, need_weights=bool(have.weights), need_lse=bool(have.lse))
    for name, x in given.items():
        old, version = before[name]
        demand(
            bool(torch.equal(x, old)) and x._version == version,
            variant,
            case,
            f"{name} was written to",
            "Use out-of-place operations on inputs (x + y rather than x += y; masked_fill rather than masked_fill_)",
        )


def check_outputs_own_their_memory(variant: Any, case: Case) -> None:
    """Writing to out disturbs neither an input nor another element of out."""
    inputs = draw(case, variant)
    with torch.no_grad():
        out = inputs.run(variant).out
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
    """With B, Lq or Lk = 0, out has its shape and is 0, and gradients flow."""
    inputs = draw(case, variant)
    differentiable = variant.capabilities.backward
    tensors = inputs.tensors()
    if differentiable:
        tensors = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    with torch.set_grad_enabled(differentiable):
        out = inputs.rebuilt(tensors).run(variant).out
    shape = [case.batch, case.num_heads, case.query_length, case.value_dim]
    demand(
        list(out.shape) == shape,
        variant,
        case,
        f"out has shape {list(out.shape)}, expected {shape}",
        "An empty input has an empty (or zero) output of the usual shape",
    )
    demand(
        not bool(out.detach().count_nonzero()),
        variant,
        case,
        "out is not 0 although no query sees a key",
        "The sum over no keys is 0",
    )
    if differentiable:
        out.sum().backward()
        for name in ("query", "key", "value"):
            gradient = tensors[name].grad
            if gradient is not None:
                demand_finite(
                    gradient,
                    variant,
                    case,
                    what=f"gradient of {name}",
                    why="sizes are empty",
                    advice="It is 0 or empty",
                )


def _strided(inputs: Inputs) -> Iterable[tuple[str, Inputs]]:
    def transposed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)  # [B, L, H, D] in memory

    def sliced(x: Tensor) -> Tensor:
        room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0)
        view = room[..., 1::2]  # a last stride of 2, an odd storage offset
        view.copy_(x)
        return view

    def one_item_for_all(x: Tensor) -> Tensor:
        return x[:1].expand(x.shape[0], -1, -1, -1)

    names = ("query", "key", "value")
    for word, change in (
        ("transposed", transposed),
        ("sliced", sliced),
        ("batch-expanded", one_item_for_all),
    ):
        yield (
            f"{word} query, key, value",
            inputs.with_tensors(**{n: change(getattr(inputs, n)) for n in names}),
        )
        for name in names:
            yield f"{word} {name}", inputs.with_tensors(**{name: change(getattr(inputs, name))})
    for name in ("mask", "bias"):
        x = inputs.arguments.get(name)
        if isinstance(x, Tensor):
            yield (
                f"transposed {name}",
                inputs.with_tensors(**{name: x.transpose(-1, -2).contiguous().transpose(-1, -2)}),
            )
    present = inputs.arguments.get("key_mask")
    if isinstance(present, Tensor):
        yield "strided key_mask", inputs.with_tensors(key_mask=present.repeat_interleave(2, 1)[:, ::2])


def _contiguous(inputs: Inputs) -> Inputs:
    copies = {n: x.contiguous().clone() for n, x in inputs.tensors().items()}
    extra = {
        n: x.contiguous().clone()
        for n, x in inputs.arguments.items()
        if isinstance(x, Tensor) and n not in copies
    }
    return inputs.rebuilt(copies).with_tensors(**extra)


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


def _stride_cases(scope: Scope) -> Iterable[Case]:
    sizes = {"dtype": scope.base}
    for labels in (
        (),
        ("causal",),
        ("mask",),
        ("bias",),
        ("key_mask_left",),
        ("gqa",),
        ("value_dim",),
        ("longer_keys",),
    ):
        yield case(*labels, **sizes)
    yield case("causal", dtype=scope.base, batch=2, query_length=67, key_length=67)
    yield from (case(dtype=d) for d in scope.dtypes if d != scope.base)


def _ownership(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base)
    yield case(dtype=scope.base, query_length=1, key_length=1, note="one token")
    yield case(
        dtype=scope.base,
        batch=1,
        num_heads=1,
        num_kv_heads=1,
        query_length=1,
        key_length=1,
        note="one of all",
    )
    yield case("causal", "gqa", dtype=scope.base)


def _empty(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("bias",)):
        yield case(*labels, dtype=scope.base, batch=0, note="B=0")
        yield case(*labels, dtype=scope.base, query_length=0, key_length=0, note="L=0")
        yield case(*labels, dtype=scope.base, query_length=0, note="Lq=0")
        yield case(*labels, dtype=scope.base, key_length=0, note="Lk=0")
    yield from (case("gqa", dtype=d, batch=0, note="B=0") for d in scope.dtypes)


CHECKS = (
    Check(check_shapes_and_dtypes, "layout", _every_argument, asks_more=True),
    Check(check_strides_do_not_matter, "layout", _stride_cases),
    Check(check_inputs_are_not_modified, "layout", _every_argument, asks_more=True),
    Check(check_outputs_own_their_memory, "layout", _ownership),
    Check(check_empty_sizes, "layout", _empty),
)
