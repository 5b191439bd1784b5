"""The linearised and delta-rule definitions, against numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.formulas import delta_rule, linearised

F64 = torch.float64
LN3 = math.log(3)


def row(*numbers: float) -> Tensor:
    """[1, 1, n, 1]: one batch item, one head, width 1."""
    return torch.tensor(numbers, dtype=F64).view(1, 1, -1, 1)


def call(
    definition: Callable[..., dict[str, Tensor]], query: Tensor, key: Tensor, value: Tensor, **more: Any
) -> dict[str, Tensor]:
    batch, heads, queries, _ = query.shape
    arguments: dict[str, Any] = {
        "visible": torch.ones(batch, heads, queries, key.shape[2], dtype=torch.bool),
        "parameters": {},
        "options": {},
        "scale": None,
    }
    return definition(query, key, value, **{**arguments, **more})


def close(got: Tensor, *expected: float) -> None:
    torch.testing.assert_close(got.flatten(), torch.tensor(expected, dtype=F64), rtol=1e-13, atol=1e-15)


# -- linearised ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature_map", "keys"),
    [("relu", (1.0, 3.0)), ("squared_relu", (1.0, math.sqrt(3))), ("elu", (0.0, 2.0)), ("exp", (0.0, LN3))],
)
def test_features_in_the_ratio_1_to_3_weigh_the_values_by_a_quarter_and_three_quarters(
    feature_map: str, keys: tuple[float, float]
) -> None:
    answer = call(linearised, row(2.0), row(*keys), row(4.0, 8.0), options={"feature_map": feature_map})
    close(answer["weights"], 0.25, 0.75)
    close(answer["out"], 7.0)


def test_elu_of_a_negative_number_is_exp() -> None:
    close(call(linearised, row(2.0), row(0.0, -LN3), row(0.0, 4.0))["out"], 1.0)  # 1/3 of 1 + 1/3


def test_a_hidden_key_leaves_numerator_and_normaliser() -> None:
    visible = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    answer = call(linearised, row(2.0), row(0.0, 2.0, 50.0), row(4.0, 8.0, 1e6), visible=visible)
    close(answer["out"], 7.0)


def test_features_that_are_all_zero_give_zero_rather_than_a_quotient_of_zeros() -> None:
    answer = call(linearised, row(1.0), row(-1.0, -2.0), row(4.0, 8.0), options={"feature_map": "relu"})
    close(answer["out"], 0.0)
    close(answer["weights"], 0.0, 0.0)


def test_exp_features_far_out_of_range_keep_their_ratio() -> None:
    answer = call(linearised, row(800.0), row(-2000.0, -2000.0 + LN3), row(4.0, 8.0), options={"feature_map": "exp"})
    torch.testing.assert_close(answer["out"].flatten(), torch.tensor([7.0], dtype=F64), rtol=1e-12, atol=0)


def test_both_forms_of_the_exp_products_agree() -> None:
    g = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, 4, 3, generator=g, dtype=F64) for _ in range(3))
    near = call(linearised, query, key, value, options={"feature_map": "exp"})
    far = call(linearised, query + 900.0, key - 900.0, value, options={"feature_map": "exp"})
    torch.testing.assert_close(near["out"], far["out"], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["scale", "bias", "softcap", "score_mod", "sinks"])
def test_linearised_refuses_the_arguments_of_score_formulas(name: str) -> None:
    with pytest.raises(ValueError, match=f"linearised: {name} is no part"):
        call(linearised, row(1.0), row(1.0), row(1.0), **{name: 1.0})


# -- delta rule ---------------------------------------------------------------------------------------------------


def vectors(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor([[rows]], dtype=F64)


E1, E2 = (1.0, 0.0), (0.0, 1.0)


def causal(n: int) -> Tensor:
    return torch.ones(1, 1, n, n, dtype=torch.bool).tril()


def test_writing_zero_under_e1_erases_it_and_leaves_e2() -> None:
    """FAULTS B121 without decay: S = I, beta = 1, k = e1, v = 0 gives S = diag(0, 1)."""
    key, value = vectors(E1, E2, E1), vectors(E1, E2, (0.0, 0.0))
    for query, expected in ((E1, (0.0, 0.0)), (E2, E2)):
        answer = call(delta_rule, vectors(query), key, value, scale=1.0)
        close(answer["out"], *expected)


def test_orthonormal_keys_and_beta_1_recall_their_values_exactly() -> None:
    key, value = vectors(E1, E2), vectors((3.0, 4.0), (5.0, 6.0))
    close(call(delta_rule, key, key, value, scale=1.0)["out"], 3.0, 4.0, 5.0, 6.0)


def test_a_beta_of_a_half_goes_half_of_the_way_each_time() -> None:
    key, value = row(1.0, 1.0, 1.0), row(8.0, 8.0, 8.0)
    beta = torch.full((1, 1, 3), 0.5, dtype=F64)
    answer = call(delta_rule, row(1.0, 1.0, 1.0), key, value, visible=causal(3), gates={"beta": beta})
    close(answer["out"], 4.0, 6.0, 7.0)


def test_a_beta_of_zero_leaves_the_memory_unchanged() -> None:
    beta = torch.tensor([[[1.0, 0.0]]], dtype=F64)
    close(call(delta_rule, row(1.0), row(1.0, 1.0), row(8.0, 100.0), gates={"beta": beta})["out"], 8.0)


def test_keys_that_a_query_does_not_see_leave_its_memory_unchanged() -> None:
    visible = torch.tensor([True, False, True]).view(1, 1, 1, 3)
    without = call(delta_rule, row(1.0), row(0.5, 0.7), row(8.0, 2.0))
    close(
        call(delta_rule, row(1.0), row(0.5, 9.0, 0.7), row(8.0, 5.0, 2.0), visible=visible)["out"],
        float(without["out"]),
    )


def test_the_default_scale_of_the_delta_rule_is_one_over_the_root_of_the_key_width() -> None:
    key = vectors((1.0, 0.0, 0.0, 0.0))
    close(call(delta_rule, key, key, row(6.0))["out"], 3.0)
