"""`torch.fx.symbolic_trace` and `torch.jit.script`: what they can make of attnlab, and what they are told where they cannot. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch.fx import Proxy

from attnlab.errors import UnsupportedRequest


def call_node(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """One node of a symbolic trace that calls `function` as it runs; some of the arguments are proxies."""
    proxies = (x for x in (*arguments, *named.values()) if isinstance(x, Proxy))
    return next(proxies).tracer.create_proxy("call_function", function, arguments, dict(named))


def hint_of(x: Any) -> str:
    """What to do where `x` is a proxy and a tensor is needed; else empty."""
    if not isinstance(x, Proxy):
        return ""
    return (
        "; torch.fx.symbolic_trace cannot look into this module: trace with a torch.fx.Tracer whose is_leaf_module says True of it, "
        "or use torch.export, make_fx or torch.jit.trace"
    )


def refuse_scripts(name: str) -> NoReturn:
    raise UnsupportedRequest(
        f"{name}: torch.jit.script does not know the Python that it is written in; use torch.jit.trace, torch.compile or torch.export"
    )
