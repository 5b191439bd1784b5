"""Calls whose like was judged before: the shortcuts of small inputs, which every variant has. Needs torch; `Attention` derives from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from attnlab._symbolic import refuse_scripts
from attnlab.call import AttentionOutput, Call, call_signature
from attnlab.gate.padding import without_absent
from attnlab.gate.visibility import visibility_of_call
from attnlab.state import State
from attnlab.visibility import AttentionMask, Visibility


class PlainCalls(nn.Module):
    """Ways around the gate for a call that says nothing but `causal`, or nothing but a mask that keeps; overriding one changes nothing but time."""

    name: str
    _served: set[Any]  # signatures of such calls that were judged: same shapes, same answer

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripts(self.name)

    if TYPE_CHECKING:

        def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput: ...

    def plain_function(self, causal: bool, contiguous: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A function `(query, key, value) -> out` for calls without arguments whose like was judged before.

        contiguous: whether all three are.
        """

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen = None
            if causal:
                seen = Visibility(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
                seen.right = 0
                seen._drop_what_hides_nothing()  # as the gate does: the first call and later ones take one path
            return self.attend(query, key, value, Call(seen, recording=torch.is_grad_enabled())).out

        return run

    def plain_masked(self, query: Tensor, key: Tensor, value: Tensor, seen: Visibility) -> Tensor:
        """`out` of a call without arguments but a mask that keeps (`AttentionMask.keeping`), whose like was judged before.

        Absent keys are cleaned already and no query is absent.
        """
        return self.attend(query, key, value, Call(seen, recording=torch.is_grad_enabled())).out

    def plain_step(self, query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
        """One call with a state and no further argument but `causal`, like the call that the state came from.

        None where the call must go the whole way, because of what the state holds or because gradients are wanted. The state is
        spent by the caller.
        """
        return None

    def masked_function(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
        """`out` of a call without arguments but a mask that keeps, whose like was judged before; `plain_masked` serves it."""
        seen, absent = visibility_of_call(mask, query, key, None, self.name)
        if absent is not None:
            key, value = without_absent(key, value, absent)
        return self.plain_masked(query, key, value, seen)

    def was_served(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: AttentionMask | None = None
    ) -> bool:
        """Whether a call like this, without arguments but a mask that keeps, was judged and served before."""
        kept = None if mask is None else mask.kept
        return call_signature("" if kept is None else kept.word, query, key, value, causal) in self._served
