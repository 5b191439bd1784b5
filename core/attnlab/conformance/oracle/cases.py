"""Cases: the sizes, dtype, seed and features of one call, and how lists of them are made.

A case holds no tensors; `inputs.draw(case, variant)` makes them, always the same for the same case.
Needs torch through `features`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from attnlab.capabilities import Capabilities
from attnlab.conformance.oracle.features import FEATURES, compatible

GEOMETRY = ("num_heads", "num_kv_heads", "head_dim", "key_dim", "value_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call: `features` are labels of `features.FEATURES`; `needs` are askables that the check itself uses."""

    features: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    batch: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    query_length: int = 7
    key_length: int = 7
    head_dim: int = 8
    key_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    note: str = ""

    @property
    def id(self) -> str:
        """`float32-causal+gqa-B2H4k2L5x7D8`: readable, unique within a check."""
        words = [self.dtype, "+".join(self.features) or "plain"]
        if self.note:
            words.append(self.note)
        heads = f"H{self.num_heads}" + (f"k{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else "")
        dims = [self.head_dim, self.key_dim, self.value_dim]
        widths = f"D{dims[0]}" if len(set(dims)) == 1 else "D" + "x".join(map(str, dims))
        words.append(f"B{self.batch}{heads}L{self.query_length}x{self.key_length}{widths}")
        return "-".join(words)

    @property
    def geometry(self) -> dict[str, int]:
        """The sizes that `attnlab.create` takes."""
        return {name: getattr(self, name) for name in GEOMETRY}

    @property
    def askables(self) -> tuple[str, ...]:
        """Every capability the case uses, in a fixed order and once: by feature, by size, by check."""
        by_feature = [name for label in self.features for name in FEATURES[label].askables]
        by_size = {
            "gqa": self.num_kv_heads != self.num_heads,
            "cross_lengths": self.query_length != self.key_length,
            "value_dim": self.value_dim != self.key_dim,
            "query_dim": self.head_dim != self.key_dim,
        }
        return tuple(dict.fromkeys([*by_feature, *(name for name, used in by_size.items() if used), *self.needs]))

    def missing(self, capabilities: Capabilities) -> list[str]:
        """What the case uses and `capabilities` does not declare."""
        lacking = [name for name in self.askables if not capabilities.declares(name)]
        if self.dtype not in capabilities.dtypes:
            lacking.append(f"dtype {self.dtype}")
        if self.device.split(":")[0] not in capabilities.devices:
            lacking.append(f"device {self.device}")
        return lacking


def case(*features: str, **sizes: Any) -> Case:
    """A case with these features, at the sizes they imply; explicit sizes win."""
    implied: dict[str, Any] = {}
    for label in features:
        implied.update(FEATURES[label].sizes)
    return Case(features=features, **{**implied, **sizes})


def each(*combinations: str, **sizes: Any) -> list[Case]:
    """One case per combination of labels, such as "causal+gqa"; "" is the plain case."""
    return [case(*filter(None, labels.split("+")), **sizes) for labels in combinations]


def singles(**sizes: Any) -> list[Case]:
    """The plain case and one per label."""
    return each("", *FEATURES, **sizes)


def pairs(labels: Iterable[str] = tuple(FEATURES), **sizes: Any) -> Iterator[Case]:
    """One case per pair of labels that can go together."""
    for two in combinations(labels, 2):
        if compatible(*two):
            yield case(*two, **sizes)


def in_dtypes(cases: Iterable[Case], dtypes: Iterable[str]) -> list[Case]:
    """Every case in every dtype."""
    listed = list(cases)
    return [replace(c, dtype=dtype) for dtype in dtypes for c in listed]


Heads = tuple[int | None, int | None]
"""The only number of query heads and of key/value heads that a variant can be made with; None: any."""


def fitted(c: Case, head_dims: range | None, device: str, heads: Heads = (None, None)) -> Case:
    """The case on `device` and at the nearest sizes that the variant can be made with; widths that differ stay different."""
    if head_dims is not None and len(head_dims):
        key = _nearest(c.key_dim, head_dims)
        query = key if c.head_dim == c.key_dim else _nearest(c.head_dim, head_dims, other_than=key)
        value = key if c.value_dim == c.key_dim else _nearest(c.value_dim, head_dims, other_than=key)
        c = replace(c, head_dim=query, key_dim=key, value_dim=value)
    query_heads, kv_heads = heads
    return replace(c, device=device, num_heads=query_heads or c.num_heads, num_kv_heads=kv_heads or c.num_kv_heads)


def _nearest(size: int, legal: range, other_than: int | None = None) -> int:
    """The legal size nearest to this one, and another than that one where there is one."""
    sizes = [d for d in legal if d != other_than] or list(legal)
    return min(sizes, key=lambda d: (abs(d - size), d))
