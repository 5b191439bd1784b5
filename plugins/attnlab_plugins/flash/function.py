"""The kernels as autograd sees them: a function for eager calls, and two operators for graphs. Needs torch and triton.

While a compiler or exporter traces, a call stands in its graph as the operators `attnlab::flash_forward` and
`attnlab::flash_backward`, which it does not look into. Both ways take `(*tensors, *numbers)` in the order of `TENSORS` and
`NUMBERS`. A gradient of a gradient is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import UnsupportedRequest
from attnlab_plugins.flash import passes
from attnlab_plugins.flash.launch import Problem
from attnlab_plugins.flash.rules import Rules

RULES = Rules._fields[2:]
"""Those of a call's rules that are tensors."""
TENSORS = ("query", "key", "value", "bias", "sinks", "seeds", *RULES)
NUMBERS = ("low_number", "high_number", "scale", "softcap", "dropout_p")
_TYPES = dict.fromkeys(TENSORS, "Tensor?") | dict.fromkeys(TENSORS[:3], "Tensor")
_TYPES |= dict(zip(NUMBERS, ("SymInt?", "SymInt?", "float", "float?", "float"), strict=True))
_SIGNATURE = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())


def problem_of(*arguments: Any) -> Problem:
    """The arguments of both operators, by name."""
    named = dict(zip(_TYPES, arguments, strict=True))
    rules = Rules(**{n: named.pop(n) for n in Rules._fields})
    return Problem(rules=rules, **named)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return passes.forward(problem_of(*arguments))


def _backward(*arguments: Any) -> list[Tensor]:
    *call, out, lse, grad_out, grad_lse, of_bias, of_sinks = arguments
    gradients = passes.backward(problem_of(*call), out, lse, grad_out, grad_lse, of_bias, of_sinks)
    return [g for g in gradients if g is not None]


torch.library.define("attnlab::flash_forward", f"({_SIGNATURE}) -> (Tensor, Tensor)")
torch.library.define(
    "attnlab::flash_backward",
    f"({_SIGNATURE}, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, bool of_bias, bool of_sinks) -> Tensor[]",
)
torch.library.impl("attnlab::flash_forward", "default", _forward)
torch.library.impl("attnlab::flash_backward", "default", _backward)


@torch.library.register_fake("attnlab::flash_forward")  # type: ignore[untyped-decorator]
def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = query.shape[:3]
    return query.new_empty(*rows, value.shape[3]), query.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake("attnlab::flash_backward")  # type: ignore[untyped-decorator]
def _backward_shapes(query: Tensor, key: Tensor, value: Tensor, bias: Any, sinks: Any, *rest: Any) -> list[Tensor]:
    of_bias, of_sinks = rest[-2:]
    inputs = [query, key, value, *([bias] if of_bias else []), *([sinks] if of_sinks else [])]
    return [t.new_empty(t.shape) for t in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.numbers = inputs[len(TENSORS) :]
    ctx.save_for_backward(*inputs[: len(TENSORS)], *output)
    ctx.set_materialize_grads(False)


def _gradients(run: Any, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient or None for each tensor and number, by `run`, which takes the backward operator's arguments."""
    *tensors, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * len(_TYPES)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    of_bias, of_sinks = ctx.needs_input_grad[3:5]
    gradients = iter(run(*tensors, *ctx.numbers, out, lse, grad_out, grad_lse, of_bias, of_sinks))
    first = [next(gradients) for _ in range(3)]
    rest = [next(gradients) if needed else None for needed in (of_bias, of_sinks)]
    return (*first, *rest, *(None for _ in range(len(_TYPES) - 5)))


def _in_graph(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(torch.ops.attnlab.flash_backward, ctx, grad_out, grad_lse)


torch.library.register_autograd("attnlab::flash_forward", _in_graph, setup_context=_save)


class FlashFunction(torch.autograd.Function):
    """`(out, lse)` of `apply(*tensors, *numbers)`, with gradients of query, key, value, bias and sinks."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(_once, ctx, grad_out, grad_lse)


def _once(*arguments: Any) -> list[Tensor]:
    with torch.no_grad():
        gradients = _backward(*arguments)
    if torch.is_grad_enabled():  # the caller wants a graph of the gradients, and there is none
        return list(_Refused.apply(len(gradients), *gradients, *arguments[:5], arguments[-4]))  # type: ignore[no-untyped-call]
    return gradients


class _Refused(torch.autograd.Function):
    """The first `count` tensors as they are; who asks for their gradient is refused, rather than answered with 0."""

    @staticmethod
    def forward(count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count] if t is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise UnsupportedRequest(
            "flash: its kernels have no gradients of gradients; dot_product serves the same formula in plain torch"
        )
