"""Registered variants as one function for all layers: an instance for each set of sizes. Needs torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab._tracing import run_while_tracing, shape_of
from attnlab.cache import BoundedCache
from attnlab.catalogue import create
from attnlab.errors import InvalidInput
from attnlab.integrations.transformers.function import Source
from attnlab.interface import Attention
from attnlab.layers.choice import storable

instances = BoundedCache()  # by variant, options and sizes


def by_name(variant: str, options: Mapping[str, Any] | None = None) -> Source:
    """Instances of a parameter-free variant, made on first use for each set of sizes."""
    text = json.dumps(storable("using", options)) if options else ""

    def find(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention:
        shapes = (query.shape, key.shape, value.shape)
        if torch._C._get_tracing_state() is not None:
            shapes = shape_of(query), shape_of(key), shape_of(value)  # type: ignore[assignment]
        (_, heads, _, width), (_, kv_heads, _, key_dim), (*_, value_dim) = shapes
        sizes = (variant, text, heads, kv_heads, width, key_dim, value_dim)
        # A graph asks each time: what it has looked up once it takes for the whole dict.
        if torch.compiler.is_compiling():
            _make(*sizes)
            traced: Attention = instances[sizes]
            return traced
        instance = instances.get(sizes)
        return _new(*sizes) if instance is None else instance

    return find


@run_while_tracing
def _make(variant: str, options: str, heads: int, kv_heads: int, width: int, key_dim: int, value_dim: int) -> None:
    """Put the variant of these sizes among the instances, unless it is there."""
    if (variant, options, heads, kv_heads, width, key_dim, value_dim) not in instances:
        _new(variant, options, heads, kv_heads, width, key_dim, value_dim)


def _new(variant: str, options: str, heads: int, kv_heads: int, width: int, key_dim: int, value_dim: int) -> Attention:
    """The variant of these sizes, now among the instances."""
    generation = instances.generation
    instance = create(
        variant,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        key_dim=key_dim,
        value_dim=value_dim,
        **(json.loads(options) if options else {}),
    )
    if not instance.parameter_free or instance.gates:
        holds = "takes gates" if instance.gates else "holds parameters of its own"
        raise InvalidInput(
            f"{variant}: it {holds}, so one function cannot serve every layer; use install(model, {variant!r}), "
            "or using(model, {layer: attnlab.create(...), ...}) for one block"
        )
    instances.put((variant, options, heads, kv_heads, width, key_dim, value_dim), instance, generation)
    return instance
