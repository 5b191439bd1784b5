"""F51: definitions at sizes of 0, and feature maps at large inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlab
from attnlab.catalogue import default_registry
from attnlab.formulas import definition_of

NAMES = [n for n in default_registry().names() if default_registry().info(n).unavailable is None]
EMPTY = [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 0, 0)]


def _gates(variant: Any, batch: int, keys: int) -> dict[str, torch.Tensor]:
    return {
        name: -torch.rand(batch, 2, keys, *([4] if spec.shape.endswith("Dk]") else []), dtype=torch.float64)
        for name, spec in variant.gates.items()
    }


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_definition_serves_sizes_of_0(name: str, sizes: tuple[int, int, int]) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=4).double()
    batch, queries, keys = sizes
    q = torch.randn(batch, 2, queries, 4, dtype=torch.float64)
    k, v = (torch.randn(batch, 2, keys, 4, dtype=torch.float64) for _ in range(2))
    positions = tuple(torch.arange(n).expand(batch, n) for n in (queries, keys))
    made = definition_of(variant)(
        q,
        k,
        v,
        visible=torch.ones(batch, 2, queries, keys, dtype=torch.bool),
        parameters={n: x.detach() for n, x in (*variant.named_parameters(), *variant.named_buffers())},
        options=variant.options,
        scale=None,
        gates=_gates(variant, batch, keys),
        positions=positions,
    )
    assert made["out"].shape == (batch, 2, queries, 4)
    assert not made["out"].any() or keys


MEANS = [n for n in NAMES if "linearised" in n]


@pytest.mark.parametrize("deviations", [8.0, 30.0])
@pytest.mark.parametrize("name", MEANS)
def test_outputs_of_normalised_maps_stay_in_the_range_of_their_values(name: str, deviations: float) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=16)
    if not variant.capabilities.normalised:
        pytest.skip("its output is no mean of values")
    for keys in (1, 2, 5, 60):
        q, k, v = (torch.randn(4, 2, n, 16) for n in (40, keys, keys))
        q, k = q * deviations, k * deviations
        out = variant(q, k, v).out
        # What a sum of 60 terms and a quotient round.
        slack = 64 * torch.finfo(torch.float32).eps * float(v.abs().max())
        assert float((out - v.amax(2, keepdim=True)).max()) < slack
        assert float((v.amin(2, keepdim=True) - out).max()) < slack
        state = variant.init_state(4)
        for t in range(min(keys, 5)):
            step = variant(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], causal=True, state=state)
            state = step.state
            low, high = (f(v[:, :, : t + 1], 2, True) for f in (torch.amin, torch.amax))
            assert float(torch.maximum(step.out - high, low - step.out).max()) < slack
