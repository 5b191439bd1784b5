"""Mutants that the checks in `checks/prepared.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab import PrecomputedKeys, RecurrentState
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookDelta
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive


class PrecomputesOutOfTheGraph(TextbookAdditive):
    """Precomputed keys are for inference, so they are detached."""

    def precompute(self, key: Tensor, **padding: Any) -> PrecomputedKeys:
        return super().precompute(key.detach(), **padding)


class PrecomputesOnlyWhatIsPresent(TextbookAdditive):
    """Padded keys are moved to the end before they are projected, and stay there."""

    def precompute(self, key: Tensor, *, key_mask: Tensor | None = None, **padding: Any) -> PrecomputedKeys:
        if key_mask is not None:
            order = key_mask.int().argsort(1, descending=True, stable=True)
            key = key.gather(2, order[:, None, :, None].expand_as(key))
        return super().precompute(key, key_mask=key_mask, **padding)


class ReordersNothing(TextbookAdditive):
    """Beams that move keep the keys of their old places."""

    def precompute(self, key: Tensor, **padding: Any) -> PrecomputedKeys:
        made = super().precompute(key, **padding)
        made.reorder = lambda index: made  # type: ignore[method-assign]
        return made


class KeepsTheCallersMemory(TextbookDelta):
    """The initial memory is not copied."""

    def init_state(self, batch: int, *how: Any, initial: Tensor | None = None, **more: Any) -> RecurrentState:
        made = super().init_state(batch, *how, initial=initial, **more)
        if initial is not None and made.memory.dtype == initial.dtype:
            made.memory = initial
        return made


class DetachesTheFirstMemory(TextbookDelta):
    """A memory to begin with is a constant."""

    def init_state(self, batch: int, *how: Any, initial: Tensor | None = None, **more: Any) -> RecurrentState:
        return super().init_state(batch, *how, initial=None if initial is None else initial.detach(), **more)


class ReadsTheFirstMemoryByItsStorage(TextbookDelta):
    """The initial memory is read as if it were contiguous."""

    def init_state(self, batch: int, *how: Any, initial: Tensor | None = None, **more: Any) -> RecurrentState:
        if initial is not None and not initial.is_contiguous():
            initial = torch.as_strided(initial, initial.shape, torch.empty(initial.shape, device="meta").stride())
        return super().init_state(batch, *how, initial=initial, **more)


class ForgetsOneOfItsParts(TextbookAdditive):
    """Keys are projected by two parameters, of which one is named."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.b_k = nn.Parameter(torch.full((self.num_heads, 1, 1), 0.2))

    def project_key(self, key: Tensor) -> Tensor:
        return super().project_key(key) + self.b_k.to(key.dtype)

    def kept_from(self) -> dict[str, Tensor]:
        return self.named_parts("W_k")


MUTANTS: tuple[Mutant, ...] = (
    Mutant(PrecomputesOutOfTheGraph, "precomputed_keys_agree_with_definition", "precomputed keys are detached"),
    Mutant(PrecomputesOnlyWhatIsPresent, "precomputed_keys_agree_with_definition", "padding is sorted to the end"),
    Mutant(ReordersNothing, "precomputed_keys_serve_many_queries", "reorder(index) gives the same keys"),
    Mutant(KeepsTheCallersMemory, "memories_may_begin_with_any_content", "the initial memory is the caller's own"),
    Mutant(DetachesTheFirstMemory, "memories_may_begin_with_any_content", "no gradient reaches the initial memory"),
    Mutant(ReadsTheFirstMemoryByItsStorage, "memories_may_begin_with_any_content", "strides of the memory are ignored"),
    Mutant(ForgetsOneOfItsParts, "what_parameters_made_is_refused_once_they_changed", "a parameter is not named"),
)
