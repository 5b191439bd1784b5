"""What tracers make of attnlab: constants of a graph, shapes while `torch.jit.trace` records, and refusals in words. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import Proxy

from attnlab.errors import UnsupportedRequest

P = ParamSpec("P")
R = TypeVar("R")


def run_while_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """`function` of constants, whose result is a constant of the graph under `torch.compile`.

    This is `torch.compiler.assume_constant_result` without its import of the whole compiler, 1.3 s at first use.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as numbers, also while `torch.jit.trace` records and `tensor.shape` holds tensors."""
    recording = torch._C._get_tracing_state()
    if recording is None:
        return tuple(tensor.shape)
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return tuple(tensor.shape)
    finally:
        torch._C._set_tracing_state(recording)  # type: ignore[attr-defined]


def call_node(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """One node of a `torch.fx.symbolic_trace` that calls `function` as it runs; some of the arguments are proxies."""
    proxies = (x for x in (*arguments, *named.values()) if isinstance(x, Proxy))
    return next(proxies).tracer.create_proxy("call_function", function, arguments, dict(named))


def proxy_hint(x: Any) -> str:
    """The end of a message that a tensor is needed: what to do if `x` is a proxy, else nothing."""
    if not isinstance(x, Proxy):
        return ""
    return (
        "; torch.fx.symbolic_trace cannot look into this module: trace with a torch.fx.Tracer whose is_leaf_module returns True for it, "
        "or use torch.export, make_fx or torch.jit.trace"
    )


def refuse_scripts(name: str) -> NoReturn:
    """Raise `UnsupportedRequest` for `torch.jit.script`."""
    raise UnsupportedRequest(
        f"{name}: torch.jit.script does not know the Python that it is written in; use torch.jit.trace, torch.compile or torch.export"
    )
