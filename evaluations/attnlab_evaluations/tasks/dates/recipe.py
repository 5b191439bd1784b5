"""How every model of the dates task is trained: one recipe for all variants. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Chosen once, for all variants and for none; a run says where it departs from it.

    steps of `batch` new examples each; embedding_dim of both sides; hidden_size of the decoder and of each direction of the
    encoder; cell `gru` or `lstm`; input_feeding (Luong et al. 2015, section 3.3); learning_rate at its highest, reached after
    the share `warm_up` of the steps; clip of the gradient's norm.
    """

    steps: int = 400
    batch: int = 64
    embedding_dim: int = 32
    hidden_size: int = 64
    cell: str = "gru"
    input_feeding: bool = True
    learning_rate: float = 4e-3
    warm_up: float = 0.1
    clip: float = 1.0
