"""Arguments of modules at model width, judged and turned into a variant. Imported by `modules` and the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnlab._choice import choice
from attnlab._gate import autocast_on
from attnlab._quoting import quoted
from attnlab._symbolic import hint_of
from attnlab.catalogue import create
from attnlab.errors import InvalidInput
from attnlab.interface import Attention


def check_widths(subject: str, *, embed_dim: int, num_heads: int, **further: int) -> None:
    """`InvalidInput` for a size that is no int of 1 or more, or an embed_dim that num_heads does not divide."""
    for word, size in {"embed_dim": embed_dim, "num_heads": num_heads, **further}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInput(f"{subject}: {word} must be an int of 1 or more, got {quoted(size)}")
    if embed_dim % num_heads:
        raise InvalidInput(
            f"{subject}: embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
        )


def variant_of(
    subject: str,
    variant: str | Mapping[str, Any] | Attention,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None,
    options: Mapping[str, Any],
) -> Attention:
    """The variant itself where an instance was given, else a new one by its name or config; `InvalidInput` where they disagree."""
    if "head_dim" in options:
        raise InvalidInput(f"{subject}: head_dim follows from embed_dim and num_heads; leave it out")
    if not isinstance(variant, Attention):
        chosen = choice(subject, variant, options, ("num_heads", "head_dim", "num_kv_heads"))
        return create(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, **chosen)
    if options or num_kv_heads is not None:
        given = sorted([*options, *(["num_kv_heads"] if num_kv_heads is not None else [])])
        raise InvalidInput(f"{subject}: options go with a name, but variant is an instance; got {given}")
    if variant.num_heads != num_heads:
        raise InvalidInput(
            f"{subject}: num_heads must be the {variant.num_heads} of the variant given, got {num_heads}"
        )
    return variant


def check_input(
    subject: str, word: str, x: Any, layouts: Mapping[int, str], width: int, weight: Tensor
) -> None:
    """`InvalidInput` where `x` has none of the layouts (number of axes -> its words), another width, or does not meet `weight`."""
    if not isinstance(x, Tensor) or x.dim() not in layouts or x.shape[-1] != width:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(
            f"{subject}: {word} must be {' or '.join(layouts.values())} with width {width}, got {got}{hint_of(x)}"
        )
    if x.device != weight.device or (x.dtype != weight.dtype and not autocast_on(x.device)):
        raise InvalidInput(
            f"{subject}: {word} is {x.dtype} on {x.device} and the module {weight.dtype} on {weight.device}; "
            "cast or move one of them"
        )
