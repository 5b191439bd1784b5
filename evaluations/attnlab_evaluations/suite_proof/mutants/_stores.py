"""A correct variant with a state of its own, of which mutants of states override a method. Needs torch."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from attnlab import CacheState, Call, State
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


class StoredAttention(TextbookAttention):
    """Scaled dot product that writes into a preallocated store: correct. `kind` is the class of its states."""

    kind: ClassVar[type[CacheState]] = CacheState

    def remember(self, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, State]:
        assert isinstance(call.state, CacheState)
        visibility = call.visibility
        assert visibility is not None
        return call.state.append(
            key, value, recording=self.recording(call), present=visibility.key_present, segments=visibility.key_segments
        )

    def recording(self, call: Call) -> bool:
        """Whether a graph may hold the store."""
        return call.recording or torch.is_grad_enabled()

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheState:
        """An empty store of `capacity` tokens, growing where that is None."""
        made: CacheState = self.kind.empty(
            batch, self.num_kv_heads, self.key_dim, self.value_dim, capacity, device, dtype
        )
        return made


def kept_in(kind: type[CacheState]) -> Any:
    """A class decorator: the variant's states are of this class."""

    def decorate(cls: type[StoredAttention]) -> type[StoredAttention]:
        cls.kind = kind
        return cls

    return decorate
