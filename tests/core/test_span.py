"""Visibility.span: the first and the last key that each query sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlab import AttentionMask
from attnlab.visibility import Visibility


@pytest.mark.parametrize("side", [3, 1024])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"causal": True, "offset": "bottom_right"},
        {"window": (2, 1), "offset": 0},
        {"key_mask": torch.tensor([[True] * 4 + [False] * 7, [False] * 11])},
        {"allowed": torch.rand(2, 3, 7, 11, generator=torch.Generator().manual_seed(0)) > 0.8},
        {"segments": (torch.arange(7)[None] // 3, torch.arange(11)[None] // 4)},
    ],
    ids=lambda r: "+".join(r) or "nothing",
)
def test_it_is_what_the_dense_mask_shows(rules: dict[str, Any], side: int) -> None:
    seen = Visibility.resolve(
        AttentionMask(**rules), batch=2, num_heads=3, query_length=7, key_length=11, device=torch.device("cpu")
    )
    first, last = seen.span(side)
    dense = seen.dense().expand(2, 3, 7, 11)
    positions = seen.key_positions.expand(2, 11)
    for b in range(2):
        for h in range(3):
            for i in range(7):
                keys = positions[b][dense[b, h, i]].tolist()
                assert (first[b, h, i], last[b, h, i]) == ((min(keys), max(keys)) if keys else (0, -1))
