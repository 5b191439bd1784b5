"""attnlab's variants as attention implementations of Hugging Face transformers.

    from attnlab.integrations import transformers as hf
    hf.register()
    model.set_attn_implementation(hf.name("dot_product"))

Needs transformers 5 or later (`pip install "attnlab[transformers]"`); imported only when asked for.
Layout inside: query `[B, Hq, Lq, D]`, key and value `[B, Hkv, Lk, D]` un-repeated; out `[B, Lq, Hq, Dv]`.

A variant that holds parameters, takes gates or decodes by a state cannot be a bare function: `install(model, "gated_delta")`
puts an instance into each layer, `load(folder)` reads it back, and `StateCache(model)` decodes by states. `using(model, ...)` is for
the length of a `with` block, and proves that every layer called.

Under `torch.compile` and `torch.export` give the whole model, with `attention_mask=` (ones where nothing is padded): variants that take no
mask of pairs need to know that it is causality, a window or padding, and a mask that was made outside a graph, as that of a static
cache's steps or of layers compiled one by one, does not say so there. A model that writes into such a mask within a graph is not noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attnlab.catalogue import info, names
from attnlab.errors import PluginError, VariantUnavailable

try:
    import transformers  # noqa: F401  # named first: the modules below fail without it in words of their own
except ImportError as missing:
    raise VariantUnavailable(
        f"attnlab.integrations.transformers needs transformers 5 or later, and importing it failed: "
        f"{missing}; install it with: pip install 'attnlab[transformers]'"
    ) from missing

from attnlab.integrations.transformers.cache import StateCache
from attnlab.integrations.transformers.configs import put, take
from attnlab.integrations.transformers.function import ModelFunction
from attnlab.integrations.transformers.installation import install, load, uninstall
from attnlab.integrations.transformers.layers import attention_layers, deaf_layers
from attnlab.integrations.transformers.saving import write_names, write_no_names
from attnlab.integrations.transformers.shared_instances import by_name, instances
from attnlab.integrations.transformers.swap import Swap, using

__all__ = [
    "StateCache",
    "Swap",
    "attention_layers",
    "deaf_layers",
    "install",
    "load",
    "name",
    "register",
    "registered",
    "uninstall",
    "unregister",
    "using",
]

_registered: dict[str, str] = {}  # implementation name -> variant

# These words in a name select other code paths inside transformers.
_TAKEN_THERE = ("flash", "sdpa", "flex_attention", "/", "|")


def name(variant: str) -> str:
    """The name under which `variant` is registered there: its row's `hf_name`, else `attnlab_<name>`.

    `UnknownVariant` where it is not registered here, `PluginError` where the name means something else there.
    """
    result = info(variant).hf_name or f"attnlab_{variant}"
    taken = [word for word in _TAKEN_THERE if word in result]
    if taken or not re.fullmatch(r"[A-Za-z0-9_.\-]+", result):
        raise PluginError(
            f"{variant}: its name in transformers must hold letters, digits, '_', '-' or '.' and none of "
            f"{', '.join(map(repr, _TAKEN_THERE))}, which mean something else there; got {result!r}: give the "
            "registry row a usable hf_name"
        )
    return result


def register(variants: Sequence[str] | None = None) -> dict[str, str]:
    """Make variants known to transformers, attention and mask function together; all of them by default.

    Returns variant -> implementation name. With None, rows that cannot be named there or whose requirements
    are missing are left out; a name asked for raises instead. Registering twice changes nothing.

    As long as names are registered, `save_pretrained` writes the name that a model runs into its `config.json`, and
    `from_pretrained` gives it back, in a process where it is registered; in another transformers refuses the name.
    """
    selection = names() if variants is None else list(variants)
    done: dict[str, str] = {}
    for variant in selection:
        try:
            implementation = name(variant)
            unavailable = info(variant).unavailable
            if unavailable:
                raise VariantUnavailable(f"{variant}: {unavailable}")
        except (PluginError, VariantUnavailable):
            if variants is not None:
                raise
            continue
        done[variant] = implementation
    for variant, implementation in done.items():  # all of them or, where one cannot be, none
        put(implementation, ModelFunction(by_name(variant), bare=True))
        _registered[implementation] = variant
    if _registered:
        write_names(_registered)
    return done


def unregister() -> None:
    """Take back everything that `register` put there, and forget the instances made for it."""
    for implementation in list(_registered):
        take(implementation)
    _registered.clear()
    write_no_names()
    instances.clear()


@contextmanager
def registered(variants: Sequence[str] | None = None) -> Iterator[dict[str, str]]:
    """`register` for the length of a block; what was registered before it stays."""
    before = set(_registered)
    done = register(variants)
    try:
        yield done
    finally:
        for implementation in set(done.values()) - before:
            take(implementation)
            del _registered[implementation]
        if not _registered:
            write_no_names()
