"""Cases: the sizes, dtype, seed and features of one call, and how lists of them are made.

A case holds no tensors; `inputs.draw(case, variant)` makes them, always the same for the same case.
Needs torch through `features`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from attnlab.capabilities import DTYPES, Capabilities
from attnlab.conformance.oracle.features import FEATURES, compatible, feature
from attnlab.errors import InvalidInput
from attnlab.requirements import NOTHING, Requirements

GEOMETRY = ("num_heads", "num_kv_heads", "head_dim", "key_dim", "value_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request: `features` are labels (see `features.feature`), `needs` askables that the check itself uses.

    options: the options of the variant that are off their defaults, as JSON.
    """

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
    options: str = ""

    @property
    def id(self) -> str:
        """The request in one line, unique within a check: `batch=2 heads=4/2 lengths=5/7 width=8 causal window=(3,0) float32`.

        heads: of queries and of keys; lengths: of queries and keys; width: of query, key and value, three where they differ.
        `Case.parse` reads it.
        """
        widths = [self.head_dim, self.key_dim, self.value_dim]
        words = [
            f"batch={self.batch}",
            f"heads={_few(self.num_heads, self.num_kv_heads)}",
            f"lengths={self.query_length}/{self.key_length}",
            f"width={_few(*widths)}",
            *(label.replace(" ", "") for label in self.features),
            self.dtype,
        ]
        words += [f"device={self.device}"] * (self.device != "cpu") + [f"seed={self.seed}"] * bool(self.seed)
        words += [self.options.replace(" ", "")] * bool(self.options) + [f"note={self.note}"] * bool(self.note)
        return " ".join(words)

    @classmethod
    def parse(cls, line: str) -> Case:
        """The case of an id; `InvalidInput` for a word that stands for nothing."""
        line, _, note = line.partition("note=")
        line, brace, options = line.partition("{")
        made = cls(note=note.strip(), options=(brace + options).strip())
        for word in line.split():
            name, _, text = word.partition("=")
            if word in DTYPES:
                made = replace(made, dtype=word)
            elif name == "device":
                made = replace(made, device=text)
            elif name in _NUMBERS:
                made = replace(made, **_numbers(word, name, text))
            else:
                feature(word)
                made = replace(made, features=(*made.features, word))
        return made

    @property
    def rows(self) -> list[int] | None:
        """The query rows to compare, where there are too many for all: those beside the borders of usual tiles, and some between."""
        last = self.query_length - 1
        if last < 16:
            return None
        chance = random.Random(self.seed + last)
        borders = [b + d for b in (16, 32, 64, 128, 256, 512, 1024) for d in (-1, 0, 1) if b + d < last]
        chosen = {0, last - 1, last, *chance.sample(borders, min(7, len(borders))), *chance.sample(range(last), 3)}
        return sorted(chosen)

    @property
    def geometry(self) -> dict[str, int]:
        """The sizes that `attnlab.create` takes."""
        return {name: getattr(self, name) for name in GEOMETRY}

    @property
    def askables(self) -> tuple[str, ...]:
        """Every capability the case uses, in a fixed order and once: by feature, by size, by check."""
        by_feature = [name for label in self.features for name in feature(label).askables]
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


_NUMBERS = {
    "batch": ("batch",),
    "heads": ("num_heads", "num_kv_heads"),
    "lengths": ("query_length", "key_length"),
    "width": ("head_dim", "key_dim", "value_dim"),
    "seed": ("seed",),
}


def _few(*numbers: int) -> str:
    """`8` for equal numbers, `8/8/5` for others."""
    return str(numbers[0]) if len(set(numbers)) == 1 else "/".join(map(str, numbers))


def _numbers(word: str, name: str, text: str) -> dict[str, Any]:
    """The sizes that a word such as "heads=4/2" states."""
    names = _NUMBERS[name]
    parts = text.split("/")
    if not all(part.isdecimal() for part in parts) or len(parts) not in (1, len(names)):
        raise InvalidInput(
            f"case: {name} takes 1{f' or {len(names)}' * (len(names) > 1)} numbers, such as 4/2, got {word!r}"
        )
    numbers = [int(part) for part in parts]
    return dict(zip(names, numbers * len(names) if len(numbers) == 1 else numbers, strict=True))


def case(*features: str, **sizes: Any) -> Case:
    """A case with these features, at the sizes they imply; explicit sizes win."""
    implied: dict[str, Any] = {}
    for label in features:
        implied.update(feature(label).sizes)
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


def meeting(c: Case, requires: Requirements) -> Case | None:
    """The case as a variant with these requirements takes it, None where it cannot be."""
    if requires == NOTHING:
        return c
    labels = list(c.features)
    set_by = {name for label in labels for name in feature(label).askables}
    labels += [name for name in ("causal", "window") if getattr(requires, name) and name not in set_by]
    queries, keys = (_meeting_length(n, requires) for n in (c.query_length, c.key_length))
    if queries is None or keys is None or (requires.equal_lengths and queries != keys):
        return None
    return replace(c, features=tuple(labels), query_length=queries, key_length=keys)


def _meeting_length(length: int, requires: Requirements) -> int | None:
    """The legal length at or above this one, None where there is none."""
    n = requires.length_multiple
    length = -(-length // n) * n
    return length if requires.max_length is None or length <= requires.max_length else None


def _nearest(size: int, legal: range, other_than: int | None = None) -> int:
    """The legal size nearest to this one, and another than that one where there is one."""
    sizes = [d for d in legal if d != other_than] or list(legal)
    return min(sizes, key=lambda d: (abs(d - size), d))
