"""Registered variants as one function for all layers: an instance for each set of sizes. Needs torch."""

from __future__ import annotations

from torch import Tensor, nn

from attnlab.catalogue import create
from attnlab.errors import InvalidInput
from attnlab.integrations._transformers_function import Source
from attnlab.interface import Attention

instances: dict[tuple[str | int, ...], Attention] = {}


def by_name(variant: str) -> Source:
    """Instances of a parameter-free variant, made on first use for each set of sizes."""

    def find(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention:
        (_, heads, _, width), (_, kv_heads, _, key_dim), value_dim = query.shape, key.shape, value.shape[3]
        sizes = (variant, heads, kv_heads, width, key_dim, value_dim)
        instance = instances.get(sizes)
        if instance is None:
            instance = create(
                variant,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=width,
                key_dim=key_dim,
                value_dim=value_dim,
            )
            if not instance.parameter_free or instance.gates:
                holds = "takes gates" if instance.gates else "holds parameters of its own"
                raise InvalidInput(
                    f"{variant}: it {holds}, so one function cannot serve every layer; use install(model, {variant!r}), "
                    "or using(model, {layer: attnlab.create(...), ...}) for one block"
                )
            instances[sizes] = instance
        return instance

    return find
