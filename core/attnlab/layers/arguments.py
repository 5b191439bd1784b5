"""Arguments of modules at model width: their validation, and the variant that they name. Imported by `multi_head` and the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from attnlab._quoting import quoted
from attnlab._tracing import proxy_hint
from attnlab.catalogue import create
from attnlab.errors import InvalidInput
from attnlab.interface import Attention
from attnlab.layers.choice import choice
from attnlab.validation.stages import autocast_on


def check_widths(subject: str, *, embed_dim: int, num_heads: int, **further: int) -> None:
    """`InvalidInput` for a size that is no int of 1 or more, or an embed_dim that num_heads does not divide."""
    for word, size in {"embed_dim": embed_dim, "num_heads": num_heads, **further}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"{subject}: {word} must be an int of 1 or more, got {quoted(size)}")
    if embed_dim % num_heads:
        raise InvalidInput(f"{subject}: embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")


def variant_of(
    subject: str,
    variant: str | Mapping[str, Any] | Attention,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None,
    options: Mapping[str, Any],
) -> Attention:
    """The variant itself if it is an instance, else a new one by its name or config; `InvalidInput` where they disagree."""
    if "head_dim" in options:
        raise InvalidInput(f"{subject}: head_dim follows from embed_dim and num_heads; leave it out")
    if not isinstance(variant, Attention):
        chosen = choice(subject, variant, options, ("num_heads", "head_dim", "num_kv_heads"))
        return create(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, **chosen)
    if options or num_kv_heads is not None:
        inputs = sorted([*options, *(["num_kv_heads"] if num_kv_heads is not None else [])])
        raise InvalidInput(f"{subject}: options go with a name, but variant is an instance; got {inputs}")
    if variant.num_heads != num_heads:
        raise InvalidInput(f"{subject}: num_heads must be the {variant.num_heads} of the variant, got {num_heads}")
    return variant


def check_input(subject: str, word: str, x: Any, layouts: Mapping[int, str], width: int, weight: Tensor | None) -> None:
    """`InvalidInput` where `x` has none of the layouts (number of axes -> its words), another width, or does not meet `weight`.

    weight: what `x` is multiplied with as it is; None where something else computes the projection and takes what it takes.
    """
    if not isinstance(x, Tensor) or x.dim() not in layouts or x.shape[-1] != width:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(
            f"{subject}: {word} must be {' or '.join(layouts.values())} with width {width}, got {got}{proxy_hint(x)}"
        )
    check_meets(subject, word, x, weight)


def check_meets(subject: str, word: str, x: Tensor, weight: Tensor | None) -> None:
    """`InvalidInput` where `x` and a `plain_weight` differ in device, or in dtype where autocast casts neither."""
    if weight is None:
        return
    if x.device != weight.device or (x.dtype != weight.dtype and not autocast_on(x.device)):
        raise InvalidInput(
            f"{subject}: {word} is {x.dtype} on {x.device} and the module {weight.dtype} on {weight.device}; "
            "cast or move one of them"
        )


def plain_weight(projection: nn.Module) -> Tensor | None:
    """The weight of a projection that multiplies its input with it and does nothing else, so that dtypes and devices must agree.

    None for a layer of 8 or 4 bits, a dynamically quantised one, a wrapper such as LoRA's, a parametrised or offloaded one.
    """
    if type(projection) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return None
    if "forward" in projection.__dict__ or projection._forward_pre_hooks:
        return None
    weight = projection._parameters.get("weight")
    return weight if type(weight) is nn.Parameter and weight.is_floating_point() else None


def placement(*modules: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where, and in what dtype, modules compute: those of their first floating-point tensor of 16 bits or more.

    The dtype is torch's default where all are quantised, the device then that of any tensor, and the CPU where there is none.
    Modules whose weights lie elsewhere between calls compute where the hooks of accelerate bring them.
    """
    device: torch.device | None = None
    for module in modules:
        brought = _brought_to(module)
        for held in (*module.parameters(), *module.buffers()):
            here = held.device if brought is None else brought
            if held.is_floating_point() and held.itemsize >= 2:
                return here, held.dtype
            device = here if device is None else device
    return torch.device("cpu") if device is None else device, torch.get_default_dtype()


def _brought_to(module: nn.Module) -> torch.device | None:
    """Where accelerate brings a module's weights for a call; None where it has no hook in it."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            execution: Any = getattr(one, "execution_device", None)
            if execution is not None:
                return torch.device("cuda", execution) if type(execution) is int else torch.device(execution)
    return None
