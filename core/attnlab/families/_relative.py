"""Where queries stand among the new tokens of a call, for families whose past is summed up."""

from __future__ import annotations

from torch import Tensor

from attnlab.errors import InvalidInput
from attnlab.state import State


def relative_offset(subject: str, offset: int | Tensor, state: State | None) -> int | Tensor:
    """`offset` counted from the first new token. A query that stands inside a summed past cannot be served."""
    past = 0 if state is None else state.length
    if not past:
        return offset
    if isinstance(offset, Tensor):
        raise InvalidInput(
            f"{subject}: with a state that holds tokens, offset must be an int or left out, got a tensor"
        )
    if offset < past - 1:
        raise InvalidInput(
            f"{subject}: offset must be {past - 1} or more, since the state's {past} tokens are summed up, got {offset}"
        )
    return offset - past
