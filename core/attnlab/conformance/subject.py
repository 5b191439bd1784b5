"""The variant under test: how instances of it are made at any size. Needs torch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlab.capabilities import Capabilities
from attnlab.conformance.cases import Case, fitted
from attnlab.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Subject:
    """A variant by name, and `make(**sizes)`, which creates an instance.

    `probe` is an instance at the base sizes: its capabilities, which it may have narrowed, decide what is
    asked. `registered` says whether the name stands in the default registry.
    """

    name: str
    make: Callable[..., Any]
    probe: Any
    registered: bool

    @property
    def capabilities(self) -> Capabilities:
        """What the variant declares, as its instances narrow it."""
        declared: Capabilities = self.probe.capabilities
        return declared

    def instance(self, case: Case) -> Any:
        """A seeded instance at the sizes, dtype and device of `case`, in eval mode."""
        return seeded(self.make, case)


def subject_of(given: Any) -> Subject:
    """A `Subject` from a registered name, an `Attention` class, or an instance (its siblings share its options)."""
    from attnlab.interface import Attention

    if isinstance(given, str):
        import attnlab

        registry = attnlab.default_registry()

        def by_name(**sizes: int) -> Any:
            return registry.create(given, **sizes)

        return Subject(given, by_name, _probe(by_name, registry.variant_class(given).capabilities), True)
    if isinstance(given, type) and issubclass(given, Attention):
        return Subject(given.name or given.__name__, given, _probe(given, given.capabilities), False)
    if isinstance(given, Attention):
        original = given

        def sibling(**sizes: int) -> Any:
            return like(original, **sizes)

        return Subject(given.name, sibling, _probe(sibling, type(given).capabilities), False)
    raise InvalidInput(
        f"run_checks: expected a registered name, an Attention class or an instance of one, got {given!r}; "
        f"`attnlab.names()` lists the registered names"
    )


def _probe(make: Callable[..., Any], ceiling: Capabilities) -> Any:
    return seeded(
        make,
        fitted(
            Case(dtype=sorted(ceiling.dtypes, key=_width)[-1] if ceiling.dtypes else "float32"),
            ceiling.head_dims,
            "cpu",
        ),
        place=False,
    )


def _width(dtype: str) -> int:
    return int(torch.finfo(getattr(torch, dtype)).bits)


def seeded(make: Callable[..., Any], case: Case, place: bool = True) -> Any:
    """`make(**sizes)` with the case's seed, without disturbing the caller's random state.

    Parameters that start at 0 throughout are moved off it: at 0 a fault in how they are used would not show.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(repr(sorted(case.geometry.items())).encode()) + case.seed)
        variant = make(**case.geometry)
        with torch.no_grad():
            for parameter in variant.parameters():
                if parameter.numel() and not bool(parameter.any()):
                    parameter.normal_(std=0.3)
    variant = variant.eval()
    return variant.to(device=case.device, dtype=getattr(torch, case.dtype)) if place else variant


def like(variant: Any, **sizes: int) -> Any:
    """Another instance of the same class, options and, where shapes agree, the same parameters."""
    base = {
        "num_heads": variant.num_heads,
        "num_kv_heads": variant.num_kv_heads,
        "head_dim": variant.head_dim,
        "key_dim": variant.key_dim,
        "value_dim": variant.value_dim,
    }
    other = type(variant)(**{**base, **sizes}, **variant.options)
    other.name = variant.name
    mine, theirs = variant.state_dict(), other.state_dict()
    if mine and {n: x.shape for n, x in mine.items()} == {n: x.shape for n, x in theirs.items()}:
        example = next(iter(mine.values()))
        other = other.to(example.device)
        for parameter in variant.parameters():
            other = other.to(parameter.dtype)
            break
        other.load_state_dict(mine)
    return other.train(variant.training)


def resized(case: Case, **sizes: Any) -> Case:
    """The case with other sizes; a convenience for checks that compare two geometries."""
    return replace(case, **sizes)
