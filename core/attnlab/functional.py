"""attend() and attention(): a parameter-free variant by name, without making a module first. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.fx import Proxy

from attnlab._quoting import quoted
from attnlab._tracing import call_node, run_while_tracing, shape_of
from attnlab.cache import BoundedCache
from attnlab.call import AttentionOutput, signature_of
from attnlab.catalogue import create
from attnlab.errors import InvalidInput, nearest
from attnlab.interface import ARGUMENTS, Attention
from attnlab.registry.making import parameters_of

_functions = BoundedCache()  # signature -> `(query, key, value) -> out`
# (variant, Hq, Hkv, Dq, Dk, Dv) -> instance; it holds no parameters, so that all may share it
_instances = BoundedCache()
_any_autocast = torch._C._is_any_autocast_enabled


def attend(
    query: Tensor, key: Tensor, value: Tensor, variant: str = "dot_product", **arguments: Any
) -> AttentionOutput:
    """Attention of `query [B, Hq, Lq, Dk]` over `key [B, Hkv, Lk, Dk]`, `value [B, Hkv, Lk, Dv]` by a named variant.

    `arguments` are those of `Attention.forward` (causal, window, key_mask, mask, bias, need_weights, state, ...). Dropout is
    applied whenever `dropout_p` is given. Raises `InvalidInput` for variants with parameters: they need `attnlab.create`.
    """
    if type(query) is Proxy:  # type: ignore[comparison-overlap]
        node: AttentionOutput = call_node(attend, (query, key, value, variant), arguments)
        return node
    made = _known(query, key, value, variant) if not is_compiling() else None
    if made is None:
        sizes = _sizes(query, key, value, variant)
        made = _of_graph(variant, *sizes) if is_compiling() else _instances.get((variant, *sizes))
        made = _new(variant, *sizes) if made is None else made
    if not arguments.keys() <= ARGUMENTS:
        unknown = next(name for name in arguments if name not in ARGUMENTS)
        raise InvalidInput(f"{variant}: no argument is called {unknown!r}; {_hint(made, variant, arguments, unknown)}")
    return made.forward(query, key, value, **arguments)


def attention(query: Tensor, key: Tensor, value: Tensor, variant: str = "dot_product", **arguments: Any) -> Tensor:
    """The output tensor `[B, Hq, Lq, Dv]` of `attend`."""
    if (not arguments or (len(arguments) == 1 and arguments.get("causal") is True)) and not is_compiling():
        # The fast path of small inputs: what was validated once is not validated again.
        causal = bool(arguments)
        signature = signature_of(variant, query, key, value, causal) if isinstance(variant, str) else None
        function = _functions.get(signature)
        if function is not None and not _any_autocast():
            out: Tensor = function(query, key, value)
            return out
        generation = _functions.generation
        out = attend(query, key, value, variant, **arguments).out
        if signature is not None and (instance := _known(query, key, value, variant)) is not None:
            function = instance.validated_function(query, key, value, causal)
            if function is not None:
                _functions.put(signature, function, generation)
        return out
    for word in ("need_weights", "need_lse", "state"):
        if arguments.get(word):
            raise InvalidInput(f"attention: returns the output alone, so {word} has no use; call attnlab.attend")
    return attend(query, key, value, variant, **arguments).out


def _hint(made: Attention, variant: str, arguments: dict[str, Any], unknown: str) -> str:
    """What to do about an unknown argument: `create` where it is an option of the variant, else the nearest names."""
    own = {*made.options, *parameters_of(type(made))}
    if unknown not in own:
        return nearest(unknown, ARGUMENTS)
    options = "".join(f", {name}={quoted(value)}" for name, value in arguments.items() if name in own)
    sizes = f"num_heads={made.num_heads}, head_dim={made.head_dim}"
    return (
        f"{unknown} is an option of {variant}, which a module takes: "
        f"attnlab.create({variant!r}, {sizes}{options})(query, key, value)"
    )


def _known(query: Any, key: Any, value: Any, variant: Any) -> Attention | None:
    try:
        _, hq, _, dq = query.shape
        _, hkv, _, dk = key.shape
        return _instances.get((variant, hq, hkv, dq, dk, value.shape[-1]))
    except (AttributeError, ValueError, IndexError, TypeError, RuntimeError):
        return None


def _sizes(query: Any, key: Any, value: Any, variant: str) -> tuple[int, int, int, int, int]:
    """`(Hq, Hkv, Dq, Dk, Dv)` of inputs that have them; `InvalidInput` otherwise."""
    if not isinstance(variant, str):
        raise InvalidInput(
            f"attend: variant must be a registered name, got {type(variant).__name__}; call the module itself"
        )
    for word, t in (("query", query), ("key", key), ("value", value)):
        nested = isinstance(t, Tensor) and t.is_nested
        if not isinstance(t, Tensor) or nested or t.dim() != 4:
            got = "a nested tensor" if nested else list(t.shape) if isinstance(t, Tensor) else type(t).__name__
            hint = "; add a batch axis with unsqueeze(0)" if isinstance(t, Tensor) and t.dim() == 3 else ""
            hint = "; pad it with to_padded_tensor(0.0) and give key_lengths=" if nested else hint
            raise InvalidInput(f"{variant}: {word} must be a tensor with four axes [B, H, L, D], got {got}{hint}")
    shapes = (query.shape, key.shape, value.shape) if is_compiling() else map(shape_of, (query, key, value))
    (_, hq, _, dq), (_, hkv, _, dk), (_, _, _, dv) = shapes
    sizes = hq, hkv, dq, dk, dv
    if not is_compiling() and any(isinstance(n, torch.SymInt) for n in sizes):
        raise InvalidInput(
            f"{variant}: heads and head widths must be numbers, and make_fx(tracing_mode='symbolic') makes symbols of all sizes; call a "
            "module of attnlab.create, whose sizes are numbers, or trace with tracing_mode='fake', torch.export or torch.compile"
        )
    if 0 in sizes:
        raise InvalidInput(
            f"{variant}: heads and head widths must be 1 or more, got {list(query.shape)}, {list(key.shape)}"
        )
    # Under torch.compile these are constants of the graph: a range's length is a number even where n is dynamic.
    hq, hkv, dq, dk, dv = (len(range(n)) for n in sizes) if is_compiling() else sizes
    return hq, hkv, dq, dk, dv


def _of_graph(variant: str, *sizes: int) -> Attention:
    """The instance in a graph, which looks it up each time: what a graph has looked up once it takes for the whole dict."""
    _make(variant, *sizes)
    instance: Attention = _instances[(variant, *sizes)]
    return instance


@run_while_tracing
def _make(variant: str, *sizes: int) -> None:
    """Put the variant of these sizes among the instances, unless it is there."""
    if (variant, *sizes) not in _instances:
        _new(variant, *sizes)


def _new(variant: str, *sizes: int) -> Attention:
    """The variant of these sizes, now among the instances."""
    generation = _instances.generation
    made = create(
        variant, num_heads=sizes[0], num_kv_heads=sizes[1], head_dim=sizes[2], key_dim=sizes[3], value_dim=sizes[4]
    )
    if not made.parameter_free:
        raise InvalidInput(
            f"{variant}: it has learned parameters, so it cannot be called without a module; "
            f"make one with attnlab.create({variant!r}, num_heads={sizes[0]}, head_dim={sizes[2]})"
        )
    _instances.put((variant, *sizes), made, generation)
    return made
