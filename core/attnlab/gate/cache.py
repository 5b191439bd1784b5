"""What was made or judged by variants' names, until the names may mean something else. Needs torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor

if TYPE_CHECKING:
    from attnlab.interface import Attention
    from attnlab.visibility import AttentionMask

_LIMIT = 1024
_changing = threading.Lock()  # between the look at a generation and what is held of it
_everything: WeakSet[Remembered] = WeakSet()


class Remembered:
    """`held`, which `forget` empties in every object of this class; it starts anew when full.

    `generation` is how often it was emptied so, for what is made while the names come to mean something else.
    """

    def __init__(self) -> None:
        self.held: dict[Any, Any] = {}
        self.generation = 0
        with _changing:
            _everything.add(self)

    def put(self, name: Any, what: object, since: int) -> None:
        """Hold `what` unless all was forgotten since that generation."""
        with _changing:
            if since != self.generation:
                return
            if len(self.held) >= _LIMIT:
                self.held.clear()
            self.held[name] = what


class Shortcuts(Remembered):
    """Functions by what a call says, its `call_signature` at least: the shortcut of small inputs.

    `(query, key, value) -> out`, or `(query, key, value, mask) -> out` of calls with a mask that keeps.
    """

    def learn(
        self,
        call: Any,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        mask: AttentionMask | None = None,
        *,
        since: int,
    ) -> None:
        """Serve calls like `call` by the variant's own shortcut, if its gate has served one without further arguments."""
        if not attention.was_served(query, key, value, causal, mask):
            return
        contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        self.put(
            call, attention.plain_function(causal, contiguous) if mask is None else attention.masked_function, since
        )


def forget() -> None:
    """Empty them all: the registry changed."""
    with _changing:
        for remembered in list(_everything):
            remembered.generation += 1
            remembered.held.clear()
