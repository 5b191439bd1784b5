"""The fast path: requests like one that was validated before, without the validation. Needs torch.

Every variant has the general one, which calls `attend` at once. A variant that knows a shorter way to the same answer opts in with
`fast_path = FastPath()` in its own class body; the conformance check `fast_path_equals_the_full_path` compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from attnlab.call import AttentionOutput
    from attnlab.state import State
    from attnlab.visibility import Visibility


class FastPath:
    """Shorter ways to what `attend` returns, for validated requests with no argument but those named here; each may return None.

    It holds for the class whose body sets it and for no subclass, which may compute something else.
    """

    def function(
        self, variant: Any, causal: bool, contiguous: bool
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """`(query, key, value) -> out` without a mask but `causal`. contiguous: whether all three tensors are."""
        return None

    def masked(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> Tensor | None:
        """`out` under a mask that caches its resolution; padded keys hold zeros and no query is padding."""
        return None

    def step(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
        """The output of one call with a state, like the call that returned this state; the caller marks the state as spent."""
        return None
