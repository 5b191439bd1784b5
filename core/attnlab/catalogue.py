"""The default registry and the three calls that use it by name. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlab.interface import Attention
    from attnlab.registry import Registry, VariantInfo


def default_registry() -> Registry:
    """The process's registry: installed packages', the user's and the project's files, read once."""
    from attnlab.registry import process  # not before a registry is asked for: it imports YAML

    return process.default_registry()


def use_registry(registry: Registry | None) -> None:
    """Make `registry` the default of this process; None reads the layers anew at next use."""
    from attnlab.registry import process

    process.use_registry(registry)


def names() -> list[str]:
    """The registered variants' names, sorted. Reads YAML only: no torch, no plugin code."""
    return default_registry().names()


def info(name: str) -> VariantInfo:
    """What the registry says about `name`, without importing it. `UnknownVariant` where it is not known."""
    return default_registry().info(name)


def create(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    **options: Any,
) -> Attention:
    """The variant `name` as an `nn.Module` for `[B, num_heads, L, head_dim]` queries.

    `num_kv_heads` (default `num_heads`) must divide `num_heads`; `key_dim` defaults to `head_dim` and
    `value_dim` to `key_dim`. `options` are the variant's own (`attnlab info NAME` lists them).

    Raises `UnknownVariant`, `VariantUnavailable`, `PluginError`, or `InvalidInput` for a bad option.
    """
    return default_registry().create(
        name,
        num_heads=num_heads,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        **options,
    )
