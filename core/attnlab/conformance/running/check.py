"""A check, and the scope that it makes its cases for. Needs torch through `oracle.features`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from attnlab.capabilities import DTYPES, Capabilities
from attnlab.conformance.oracle.cases import Case, Heads, each
from attnlab.conformance.oracle.features import feature
from attnlab.conformance.oracle.space import Row, Space, designed, space_of
from attnlab.requirements import NOTHING, Requirements


class NotApplicable(Exception):
    """Raised by a check that does not apply to this variant; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What cases are made from: the declared capabilities, and whether the run is quick."""

    capabilities: Capabilities
    quick: bool
    family: str = ""
    has_gates: bool = False
    settings: Mapping[str, Capabilities] = field(default_factory=dict)
    heads: Heads = (None, None)
    widest: int = 256
    requires: Requirements = NOTHING

    @property
    def stepwise(self) -> bool:
        """Whether it walks token by token, so that long inputs are to be kept shorter."""
        return self.family == "recurrent"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The declared dtypes, widest first."""
        return tuple(d for d in DTYPES if d in self.capabilities.dtypes)

    @property
    def base(self) -> str:
        """The dtype for checks that are not about dtypes: float32 where declared, else the widest."""
        if "float32" in self.dtypes or not self.dtypes:
            return "float32"
        return self.dtypes[0]

    @property
    def precise(self) -> str:
        """The widest declared dtype."""
        return self.dtypes[0] if self.dtypes else "float32"

    @property
    def other_dtypes(self) -> tuple[str, ...]:
        """The declared dtypes without `base`."""
        return tuple(d for d in self.dtypes if d != self.base)

    @property
    def space(self) -> Space:
        """The space of this variant's requests."""
        settings = self.settings or {"": self.capabilities}
        kind: dict[str, Any] = {"family": self.family, "gated": self.has_gates}
        return space_of(settings, self.requires, base=self.base, heads=self.heads, widest=self.widest, **kind)

    def requests(
        self,
        *needs: str,
        without: Iterable[str] = (),
        change: Callable[[Row], Row | None] | None = None,
        full: int | None = None,
        quick: int | None = None,
        seed: int = 0,
    ) -> list[Case]:
        """Requests of the covering design, for a check that needs these askables.

        without: axes that are left at their plain value. change: what becomes of a row, None where it is left out. full, quick: as many
        of them, evenly spread, in a full and in a quick run, beside those that ask for one argument alone. seed: that of the numbers, and of which requests are kept.
        """
        space = self.space
        plain = {name: space.axes[name][0] for name in without if name in space.axes}
        cases: dict[str, Case] = {}
        alone: dict[str, Case] = {}
        for number, row in enumerate(designed(space, full=not self.quick)):
            changed: Row | None = {**row, **plain}
            changed = change(changed) if change is not None and changed is not None else changed
            if changed is not None and space.allows(changed):
                one = replace(space.case(changed, seed + number), needs=needs)
                (alone if row["alone"] else cases).setdefault(replace(one, seed=0).id, one)
        return [*alone.values(), *spread(list(cases.values()), quick if self.quick else full, seed)]

    def declared(self, *labels: str) -> tuple[str, ...]:
        """Those labels whose every askable is declared."""
        return tuple(x for x in labels if all(self.capabilities.declares(name) for name in feature(x).askables))

    def cases(self, *combinations: str, **sizes: Any) -> list[Case]:
        """One case per combination of labels, such as "causal+gqa", in the base dtype; "" is the plain case."""
        return each(*combinations, **{"dtype": self.base, **sizes})

    def usable(self, *combinations: str, **sizes: Any) -> list[Case]:
        """The same, each combination without the labels that are not declared."""
        return self.cases(*("+".join(self.declared(*filter(None, x.split("+")))) for x in combinations), **sizes)


def small(row: Row) -> Row | None:
    """The row, where all its pairs can be looked at."""
    (queries, keys), (heads, _) = row["lengths"], row["heads"]
    return row if row["batch"] * heads * queries * keys <= 2**14 else None


def precise(row: Row) -> Row | None:
    """The same, without a bias beside which scores lose their digits, so that two right orders of one sum differ."""
    return small({**row, "bias": "bias"} if row.get("bias") in ("bias=least", "bias=large") else row)


def hiding(*axes: str) -> Callable[[Row], Row | None]:
    """The row, where one of those axes has a value and its pairs are few."""
    return lambda row: small(row) if any(row.get(axis) for axis in axes) else None


def spread(cases: list[Case], most: int | None, shift: int = 0) -> list[Case]:
    """At most that many of the cases, evenly spread from the first to the last."""
    if most is None or len(cases) <= most:
        return cases
    if not most:
        return []
    step = len(cases) / most
    return [cases[int(n * step + shift % step)] for n in range(most)]


@dataclass(frozen=True, slots=True)
class Check:
    """A plain function `check_<property>(variant, case)`, its topic, and its cases.

    claims: properties that switch it on; without them it is not applicable. unless: properties that switch it off. asks_more: whether it requests declared
    things beyond its case's features (weights beside a mask, say), so that refusing the combination is no fault.
    slow: whether a quick run leaves it out. One process runs all of these: most make torch load its compiler, for seconds.
    random_too: whether it holds for a variant that is random by design, as calls of one shape draw the same numbers
    (`Inputs.run` seeds them); otherwise it is not applicable to such a variant.
    """

    function: Callable[[Any, Case], None]
    topic: str
    cases: Callable[[Scope], Iterable[Case]]
    claims: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    asks_more: bool = False
    random_too: bool = False
    slow: bool = False

    def switched_off(self, have: Capabilities) -> str:
        """Why it does not apply to a variant of these capabilities, "" where it does."""
        if lacking := [name for name in self.claims if not have.declares(name)]:
            return f"it does not claim {', '.join(lacking)}"
        off = [name for name in self.unless if have.declares(name)]
        return f"it declares {', '.join(off)}" if off else ""

    @property
    def name(self) -> str:
        """The function's name without `check_`."""
        return self.function.__name__.removeprefix("check_")
