"""A check, and the scope that it makes its cases for. Needs torch through `oracle.features`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attnlab.capabilities import DTYPES, Capabilities
from attnlab.conformance.oracle.cases import Case, each
from attnlab.conformance.oracle.features import FEATURES


class NotApplicable(Exception):
    """Raised by a check that does not apply to this variant; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What cases are made from: the declared capabilities, and whether the run is quick."""

    capabilities: Capabilities
    quick: bool
    family: str = ""
    has_gates: bool = False

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

    def declared(self, *labels: str) -> tuple[str, ...]:
        """Those labels whose every askable is declared."""
        return tuple(x for x in labels if all(self.capabilities.declares(name) for name in FEATURES[x].askables))

    def cases(self, *combinations: str, **sizes: Any) -> list[Case]:
        """One case per combination of labels, such as "causal+gqa", in the base dtype; "" is the plain case."""
        return each(*combinations, **{"dtype": self.base, **sizes})

    def usable(self, *combinations: str, **sizes: Any) -> list[Case]:
        """The same, each combination without the labels that are not declared."""
        return self.cases(*("+".join(self.declared(*filter(None, x.split("+")))) for x in combinations), **sizes)


@dataclass(frozen=True, slots=True)
class Check:
    """A plain function `check_<property>(variant, case)`, its topic, and its cases.

    claims: properties that switch it on; without them it is not applicable. asks_more: whether it requests declared
    things beyond its case's features (weights beside a mask, say), so that refusing the combination is no fault.
    slow: whether a quick run leaves it out. One process runs all of these: most make torch load its compiler, for seconds.
    random_too: whether it holds for a variant that is random by design, as calls of one shape draw the same numbers
    (`Inputs.run` seeds them); otherwise it is not applicable to such a variant.
    """

    function: Callable[[Any, Case], None]
    topic: str
    cases: Callable[[Scope], Iterable[Case]]
    claims: tuple[str, ...] = ()
    asks_more: bool = False
    random_too: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        """The function's name without `check_`."""
        return self.function.__name__.removeprefix("check_")
