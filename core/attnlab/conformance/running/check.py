"""What a check is, and the scope it makes its cases for. Needs only the standard library and capabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attnlab.capabilities import DTYPES, Capabilities
from attnlab.conformance.oracle.cases import Case


class NotApplicable(Exception):
    """Raised by a check that cannot judge this variant; the message is the reason shown."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is known when cases are made: the declared capabilities, and whether to be quick."""

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


@dataclass(frozen=True, slots=True)
class Check:
    """A plain function `check_<property>(variant, case)`, its topic, and its cases.

    claims: properties that switch it on; unclaimed means not applicable. asks_more: whether it asks for declared
    things beyond its case's features (weights beside a mask, say), so that a refused combination is no fault.
    slow: whether a quick run leaves it out. One process takes all of these: most make torch load its compiler, for seconds.
    random_too: whether it holds for a variant that is random by design, as calls of one shape draw the same numbers
    (`Inputs.run` seeds them); unset, such a variant is not judged by it.
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
