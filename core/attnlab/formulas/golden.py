"""Golden cases: small inputs and the numbers that a formula must give for them, from outside the implementation.

A definition is written by the person who wrote the variant, so both may share a mistake. Golden cases come
from somewhere else: a worked example of the paper, its published code, or a loop over plain numbers written
apart. The conformance suite runs variant and definition on them. Those of the shared formulas are in
`golden.json` beside this file. Making a `GoldenCase` needs only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NEEDED = 3
"""Golden cases from which on a formula counts as verified (docs/contract.md, "Definition and implementation")."""

Numbers = Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenCase:
    """One call with the output that it must have.

    query, key, value, out: nested lists `[B, H, L, D]`, or `[L, D]` for one item with one head.
    arguments: keyword arguments of `forward`; lists become tensors (bool, int64 or float), gates by name.
    parameters: the variant's whole state_dict as nested lists, where it has one. options: those that decide the
    formula (a feature map, say); a variant with other values of them skips the case. extra_options: further ones
    to create the variant with, such as a hidden size. decimals: how many digits after the point the numbers of
    `out` carry, which is all that they can prove. source: where they come from.
    """

    source: str
    query: Numbers
    key: Numbers
    value: Numbers
    out: Numbers
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Numbers] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    extra_options: Mapping[str, Any] = field(default_factory=dict)
    decimals: int = 6

    def fits(self, options: Mapping[str, Any]) -> bool:
        """Whether a variant with these options is the one that the numbers were made for; one that lacks an option has it off."""
        return all((options.get(name) or None) == (expected or None) for name, expected in self.options.items())

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """`query`, `key`, `value` or `out` with four axes."""
        import torch

        x = torch.tensor(getattr(self, name), dtype=dtype)
        x = x[None, None] if x.dim() == 2 else x
        if x.dim() != 4:
            raise PluginError(
                f"golden case {self.source!r}: {name} must be [B, H, L, D] or [L, D], got {list(x.shape)}"
            )
        return x

    def call(self, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments of `forward`, lists made tensors."""
        return {name: _tensors(value, dtype) for name, value in self.arguments.items()}

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters as tensors."""
        import torch

        return {name: torch.tensor(x, dtype=dtype) for name, x in self.parameters.items()}


def _tensors(value: Any, dtype: torch.dtype) -> Any:
    import torch

    if isinstance(value, Mapping):
        return {name: _tensors(part, dtype) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensors(part, dtype) for part in value)
    if isinstance(value, list):
        x = torch.tensor(value)
        return torch.tensor(value, dtype=dtype) if x.dtype.is_floating_point else x
    return value


@cache
def shared_golden_cases() -> Mapping[str, tuple[GoldenCase, ...]]:
    """The golden cases of the shared formulas, by formula."""
    text = Path(__file__).with_name("golden.json").read_text(encoding="utf-8")
    return {formula: tuple(GoldenCase(**case) for case in cases) for formula, cases in json.loads(text).items()}


def golden_cases(variant: Any) -> tuple[GoldenCase, ...]:
    """What `variant` (an instance) must reproduce: its class's own cases, and those of a shared definition it is held to."""
    own = tuple(getattr(type(variant), "golden", ()))
    for one in own:
        if not isinstance(one, GoldenCase):
            raise PluginError(
                f"{type(variant).__name__}: golden must hold attnlab.GoldenCase objects, got {type(one).__name__}"
            )
    shared: tuple[GoldenCase, ...] = ()
    if getattr(type(variant), "definition", None) is None:
        shared = shared_golden_cases().get(str(getattr(type(variant), "formula", "")), ())
    return tuple(one for one in (*own, *shared) if one.fits(getattr(variant, "options", {})))
