"""A variant as a config keeps it: a name, or a small mapping such as `{"name": "sliding_window", "left": 255}`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attnlab._quoting import quoted
from attnlab.errors import InvalidInput

SIZES = ("num_heads", "head_dim", "num_kv_heads", "key_dim", "value_dim")


def choice(subject: str, variant: Any, options: Mapping[str, Any], sizes: tuple[str, ...] = SIZES) -> dict[str, Any]:
    """`variant`, a name or a mapping with one, and `options` as one mapping: what `attnlab.create` takes beside sizes.

    `sizes` are those that the caller's module decides. `InvalidInput` for another kind of variant, a name that is no text, an
    option that is no text or given twice, and for one of the sizes.
    """
    arguments = {"name": variant} if isinstance(variant, str) else variant
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("name"), str):
        raise InvalidInput(
            f'{subject}: variant must be a registered name or a mapping such as {{"name": "sliding_window", "left": 255}}, got '
            f"{quoted(variant)}"
        )
    for option in arguments:
        if not isinstance(option, str):
            raise InvalidInput(f"{subject}: the names of a variant's options must be text, got {quoted(option)}")
        if option in options:
            raise InvalidInput(f"{subject}: {option} is given twice, in variant and beside it; leave one out")
    for size in sizes:
        if size in arguments or size in options:
            raise InvalidInput(f"{subject}: {size} is the module's, not the variant's; leave it out of the options")
    return {**arguments, **options}


def storable(subject: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """`chosen` as it comes back from JSON; `InvalidInput` where JSON cannot hold it."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(chosen, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{subject}: a config's options must be such as JSON can hold, got {quoted(chosen)}: {error}"
        ) from error
    return kept


def in_words(chosen: Mapping[str, Any]) -> str:
    """`sliding_window(left=255)`."""
    options = ", ".join(f"{option}={quoted(value)}" for option, value in chosen.items() if option != "name")
    return f"{chosen['name']}({options})" if options else str(chosen["name"])
