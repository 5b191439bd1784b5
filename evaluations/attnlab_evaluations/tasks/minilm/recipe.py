"""How a variant is taught to stand in for the pretrained attention: one recipe for all variants. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Two stages of Adam with a one-cycle learning rate, on `batch` sentences of equal length a step, none used twice.

    weight_steps: each layer by itself, on the states that the pretrained model gives it, is brought to that layer's attention
    weights (Zhang et al. 2024, "The Hedgehog & the Porcupine", section 4.2). state_steps: the whole model is brought to the
    states and the embedding that the pretrained model has. What the variant learns moves at `variant_rate`, the attention's
    own projections at `projection_rate`, both times `state_share` in the second stage; all else is kept.
    """

    weight_steps: int = 120
    state_steps: int = 160
    batch: int = 16
    variant_rate: float = 1e-2
    projection_rate: float = 1e-3
    state_share: float = 0.3
    warm_up: float = 0.1
