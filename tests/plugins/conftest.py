"""Small inputs for the tests of single variants, and formulas written out with numpy and plain loops."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor


def softmax_rows(scores: Any, value: Any, visible: Any) -> tuple[Any, Any]:
    """`(out, weights)` of one head: `scores [Lq, Lk]`, `value [Lk, Dv]`, bool `visible [Lq, Lk]`; numpy, row by row."""
    weights = numpy.zeros_like(scores)
    for i, row in enumerate(scores):
        if visible[i].any():
            e = numpy.where(visible[i], numpy.exp(row - row[visible[i]].max()), 0.0)
            weights[i] = e / e.sum()
    return weights @ value, weights


@pytest.fixture
def make() -> Any:
    """`make(B, H, L, D)`: normal float64 numbers."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    return normal


@pytest.fixture
def rows() -> Any:
    return softmax_rows
