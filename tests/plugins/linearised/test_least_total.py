"""The least normaliser counts for the products themselves, however large the other features of a query are."""

from __future__ import annotations

import pytest
import torch

from attnlab import create


@pytest.mark.parametrize("kind", ["relu", "squared_relu"])
def test_a_tiny_product_beside_large_features_of_the_query_is_divided_by_the_least_total(kind: str) -> None:
    variant = create("linearised", num_heads=1, head_dim=2, feature_map=kind).double()
    power = {"relu": 1, "squared_relu": 2}[kind]
    query = torch.tensor([[[[1e-2, 7.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1e-5 if power == 1 else 1e-2, -1.0]]]], dtype=torch.float64)
    value = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    product = float((query[..., 0] * key[..., 0]) ** power)
    assert product < 1e-6
    torch.testing.assert_close(variant(query, key, value).out, value * product / 1e-6)
