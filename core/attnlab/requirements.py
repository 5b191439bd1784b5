"""What every call of a variant must be, as frozen data. Needs only the standard library."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.capabilities import Reason
from attnlab.errors import PluginError
from attnlab.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What every call of a variant must be; by default nothing. A call that is otherwise is refused, and checks make none.

    causal: it states `causal=True`. window: it states a `window`. equal_lengths: queries and keys are as many, a state's tokens
    counted. length_multiple: both lengths are multiples of this. max_length: neither is larger than this. `head_dims` of the
    capabilities states legal widths.
    """

    causal: bool = False
    window: bool = False
    equal_lengths: bool = False
    length_multiple: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        for word, number in (("length_multiple", self.length_multiple), ("max_length", self.max_length)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise PluginError(f"Requirements: {word} must be an int of 1 or more, got {number!r}")

    def reasons(self, request: Request) -> list[Reason]:
        """A `Reason` for each requirement that a request does not meet."""
        queries, keys, n, longest = (
            request.query_length + request.past,
            request.key_length,
            self.length_multiple,
            self.max_length,
        )
        reasons = []
        if self.causal and not request.asks("causal"):
            reasons.append(Reason("causal", "a call without causal=True", "causal=True"))
        if self.window and not request.asks("window"):
            reasons.append(Reason("window", "a call without window=", "window=(left, right)"))
        # A length is written into words only where it is refused: in a graph its number would be a constant.
        if self.equal_lengths and queries != keys:
            reasons.append(Reason("length", f"{queries} queries and {keys} keys", "as many of both"))
        if n > 1 and (queries % n or keys % n):
            reasons.append(Reason("length", f"{queries} queries and {keys} keys", f"multiples of {n}"))
        if longest is not None and (queries > longest or keys > longest):
            reasons.append(Reason("length", f"{queries if queries > longest else keys} tokens", f"up to {longest}"))
        return reasons


NOTHING = Requirements()
"""What a variant requires that states nothing."""
