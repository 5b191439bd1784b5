"""The definitions, against numbers worked by hand and against loops that share no code with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.errors import PluginError
from attnlab.formulas import DEFINITIONS, additive, definition_of, multiplicative, softmax_dot_product

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


# -- scaled dot product -------------------------------------------------------------------------------------------


def test_scores_of_log_1_and_log_3_weigh_the_values_by_a_quarter_and_three_quarters() -> None:
    answer = call(softmax_dot_product, row(1.0), row(0.0, LN3), row(4.0, 8.0))
    close(answer["weights"], 0.25, 0.75)
    close(answer["out"], 7.0)
    close(answer["lse"], math.log(4))


def test_a_sink_of_log_4_takes_half_of_the_weight_and_carries_no_value() -> None:
    answer = call(
        softmax_dot_product, row(1.0), row(0.0, LN3), row(4.0, 8.0), sinks=torch.tensor([math.log(4)], dtype=F64)
    )
    close(answer["weights"], 0.125, 0.375)
    close(answer["out"], 3.5)
    close(answer["lse"], math.log(8))


def test_the_default_scale_is_one_over_the_root_of_the_key_width() -> None:
    query, key = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]], dtype=F64), torch.zeros(1, 1, 2, 4, dtype=F64)
    key[0, 0, 1, 0] = LN3  # the score is 2 ln 3 / sqrt(4) = ln 3
    close(call(softmax_dot_product, query, key, row(4.0, 8.0))["out"], 7.0)


def test_scale_comes_before_softcap_and_softcap_before_bias() -> None:
    key, bias = row(4.0), torch.full((1, 1, 1, 1), 0.25, dtype=F64)
    answer = call(softmax_dot_product, row(1.0), key, row(1.0), scale=0.5, softcap=2.0, bias=bias)
    close(answer["lse"], 2 * math.tanh(4 * 0.5 / 2.0) + 0.25)


def test_score_mod_comes_after_softcap_and_before_bias_and_sees_positions() -> None:
    def plus_distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 2 * score + 10 * q + k

    where = (torch.tensor([[7]]), torch.tensor([[3]]))
    bias = torch.ones(1, 1, 1, 1, dtype=F64)
    answer = call(
        softmax_dot_product,
        row(1.0),
        row(4.0),
        row(1.0),
        scale=1.0,
        softcap=3.0,
        score_mod=plus_distance,
        bias=bias,
        positions=where,
    )
    close(answer["lse"], 2 * 3 * math.tanh(4 / 3) + 70 + 3 + 1)


def test_a_bias_of_minus_infinity_hides_the_pair() -> None:
    bias = torch.tensor([0.0, -math.inf], dtype=F64).view(1, 1, 1, 2)
    answer = call(softmax_dot_product, row(1.0), row(0.0, LN3), row(4.0, 8.0), bias=bias)
    close(answer["weights"], 1.0, 0.0)
    close(answer["out"], 4.0)


def test_a_query_that_sees_nothing_gives_zeros_and_an_lse_of_minus_infinity_even_beside_a_sink() -> None:
    hidden = torch.zeros(1, 1, 1, 2, dtype=torch.bool)
    for sinks in (None, torch.tensor([1.0], dtype=F64)):
        answer = call(softmax_dot_product, row(1.0), row(0.0, LN3), row(4.0, 8.0), visible=hidden, sinks=sinks)
        close(answer["out"], 0.0)
        close(answer["weights"], 0.0, 0.0)
        assert answer["lse"].item() == -math.inf


def test_no_keys_at_all_give_zeros() -> None:
    empty = row().view(1, 1, 0, 1)
    answer = call(softmax_dot_product, row(1.0, 2.0), empty, empty)
    close(answer["out"], 0.0, 0.0)


def test_scores_in_the_thousands_stay_finite() -> None:
    answer = call(softmax_dot_product, row(1.0), row(5000.0, 5000.0 + LN3), row(4.0, 8.0))
    # 5000 + ln 3 is stored with an error of about 5e-13, which is the relative error of e to that power.
    torch.testing.assert_close(answer["out"].flatten(), torch.tensor([7.0], dtype=F64), rtol=1e-12, atol=0)


def test_query_heads_read_key_heads_in_groups_0_0_1_1() -> None:
    query = torch.ones(1, 4, 1, 1, dtype=F64)
    key, value = torch.zeros(1, 2, 1, 1, dtype=F64), torch.tensor([10.0, 20.0], dtype=F64).view(1, 2, 1, 1)
    close(call(softmax_dot_product, query, key, value)["out"], 10.0, 10.0, 20.0, 20.0)


def test_dot_product_equals_a_loop_over_scalars() -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, d, generator=g, dtype=F64) for n, d in ((3, 4), (5, 4), (5, 2)))
    visible = torch.rand(2, 2, 3, 5, generator=g) < 0.7
    got = call(softmax_dot_product, query, key, value, visible=visible)["out"]
    for b in range(2):
        for h in range(2):
            for i in range(3):
                top, bottom = [0.0, 0.0], 0.0
                for j in range(5):
                    if visible[b, h, i, j]:
                        score = sum(float(query[b, h, i, d] * key[b, h, j, d]) for d in range(4)) / 2.0
                        bottom += math.exp(score)
                        top = [t + math.exp(score) * float(value[b, h, j, d]) for d, t in enumerate(top)]
                close(got[b, h, i], *(t / bottom if bottom else 0.0 for t in top))


# -- additive and multiplicative ----------------------------------------------------------------------------------


def test_additive_puts_the_tanh_of_the_sum_between_the_two_projections_and_v() -> None:
    # tanh(ln 2) = 3/5: with W_q = 2, W_k = 3 and v = 5 the score of q = ln(2)/4, k = ln(2)/6 is 5 * 3/5 = 3.
    one = torch.ones(1, 1, 1, dtype=F64)
    parameters = {"W_q": 2 * one, "W_k": 3 * one, "v": 5 * torch.ones(1, 1, dtype=F64)}
    ln2 = math.log(2)
    answer = call(additive, row(ln2 / 4), row(ln2 / 6), row(1.0), parameters=parameters)
    close(answer["lse"], 3.0)


def test_additive_equals_a_double_loop_at_unequal_lengths_and_widths() -> None:
    g = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, n, d, generator=g, dtype=F64) for n, d in ((3, 4), (5, 6), (5, 2)))
    parameters = {
        "W_q": torch.randn(1, 3, 4, generator=g, dtype=F64),
        "W_k": torch.randn(1, 3, 6, generator=g, dtype=F64),
        "v": torch.randn(1, 3, generator=g, dtype=F64),
    }
    got = call(additive, query, key, value, parameters=parameters)
    for i in range(3):
        e = []
        for j in range(5):
            inside = [
                math.tanh(
                    sum(float(parameters["W_q"][0, a, d] * query[0, 0, i, d]) for d in range(4))
                    + sum(float(parameters["W_k"][0, a, d] * key[0, 0, j, d]) for d in range(6))
                )
                for a in range(3)
            ]
            e.append(math.exp(sum(float(parameters["v"][0, a]) * inside[a] for a in range(3))))
        close(got["weights"][0, 0, i], *(x / sum(e) for x in e))


def test_luong_dot_is_not_divided_by_the_root_of_the_width() -> None:
    query, key = torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]], dtype=F64), torch.zeros(1, 1, 2, 4, dtype=F64)
    key[0, 0, 1, 0] = LN3
    close(call(multiplicative, query, key, row(4.0, 8.0), options={"score": "dot"})["out"], 7.0)


def test_luong_general_puts_the_query_on_the_left_of_the_matrix() -> None:
    # q = (1, 0), k = (0, 1): q^T W k reads W[0, 1] = 3, k^T W q would read W[1, 0] = 5.
    w = torch.tensor([[[2.0, 3.0], [5.0, 7.0]]], dtype=F64)
    query, key = torch.tensor([[[[1.0, 0.0]]]], dtype=F64), torch.tensor([[[[0.0, 1.0]]]], dtype=F64)
    answer = call(multiplicative, query, key, row(1.0), options={"score": "general"}, parameters={"W_a": w})
    close(answer["lse"], 3.0)


def test_luong_concat_puts_the_query_first() -> None:
    # W_a = (2, 6): 2 q + 6 k with q = ln(2)/4 and k = ln(2)/12 is ln 2, whose tanh is 3/5.
    ln2 = math.log(2)
    parameters = {"W_a": torch.tensor([[[2.0, 6.0]]], dtype=F64), "v_a": torch.tensor([[5.0]], dtype=F64)}
    answer = call(
        multiplicative, row(ln2 / 4), row(ln2 / 12), row(1.0), options={"score": "concat"}, parameters=parameters
    )
    close(answer["lse"], 3.0)


def test_luong_location_reads_the_row_of_the_keys_position() -> None:
    w = torch.tensor([[[1.0], [0.0], [LN3]]], dtype=F64)  # [H, max_length, Dq]
    where = (torch.tensor([[0]]), torch.tensor([[1, 2]]))
    answer = call(
        multiplicative,
        row(1.0),
        row(9.0, 9.0),
        row(4.0, 8.0),
        options={"score": "location"},
        parameters={"W_a": w},
        positions=where,
    )
    close(answer["out"], 7.0)


def test_an_unknown_luong_score_is_refused() -> None:
    with pytest.raises(ValueError, match="dot, general, concat or location"):
        call(multiplicative, row(1.0), row(1.0), row(1.0), options={"score": "generall"})


# -- all of them --------------------------------------------------------------------------------------------------


def parameters_for(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    g = torch.Generator().manual_seed(8)
    if name == "additive":
        shapes = {"W_q": (2, 3, 4), "W_k": (2, 3, 4), "v": (2, 3)}
    elif name == "multiplicative":
        shapes = {"W_a": (2, 4, 4)}
    else:
        shapes = {}
    options = {"left": 1, "right": 1, "sink_tokens": 0} if name == "sliding_window" else {}
    return {n: torch.randn(*s, generator=g, dtype=F64) for n, s in shapes.items()}, options


def standing(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys that begin at 0."""
    return torch.arange(queries).expand(batch, -1), torch.arange(keys).expand(batch, -1)


def random_call(name: str, **changes: Any) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(9)
    query, key, value = (torch.randn(2, 2, n, 4, generator=g, dtype=F64) for n in (4, 5, 5))
    if name == "delta_rule":
        key = torch.nn.functional.normalize(key, dim=-1)
    parameters, options = parameters_for(name)
    given: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "visible": torch.rand(2, 2, 4, 5, generator=g) < 0.6,
    }
    given["positions"] = standing(4, 5)
    given.update({n: change(given[n]) for n, change in changes.items()})
    main = [given.pop(n) for n in ("query", "key", "value")]
    return call(DEFINITIONS[name], *main, parameters=parameters, options=options, **given)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_every_query_row_may_be_computed_on_its_own(name: str) -> None:
    whole = random_call(name)["out"]
    some = random_call(
        name, query=lambda x: x[:, :, 1:3], visible=lambda x: x[:, :, 1:3], positions=lambda p: (p[0][:, 1:3], p[1])
    )["out"]
    torch.testing.assert_close(some, whole[:, :, 1:3], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
@pytest.mark.parametrize("content", [math.nan, math.inf, 1e30])
def test_what_an_absent_key_holds_reaches_neither_output_nor_gradient(name: str, content: float) -> None:
    def hide(visible: Tensor) -> Tensor:
        visible = visible.clone()
        visible[..., 2], visible[:, :, 1] = False, False  # key 2 is absent, query 1 sees nothing
        return visible

    leaves: list[Tensor] = []

    def fill(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :, 2 if x.shape[2] == 5 else 1] = content
        leaves.append(x.requires_grad_())
        return x

    clean = random_call(name, visible=hide)["out"]
    dirty = random_call(name, visible=hide, query=fill, key=fill, value=fill)["out"]
    torch.testing.assert_close(dirty, clean, rtol=1e-13, atol=1e-14)
    for gradient in torch.autograd.grad(dirty.sum(), leaves):
        assert gradient.isfinite().all()
        assert not gradient[:, :, 2 if gradient.shape[2] == 5 else 1].any()


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_a_nan_in_a_hidden_pair_reaches_no_row_that_does_not_see_it(name: str) -> None:
    def hide(visible: Tensor) -> Tensor:
        visible = torch.ones_like(visible)
        visible[:, :, :2, 3] = False
        return visible

    def fill(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, :, 3] = math.nan
        return x

    clean = random_call(name, visible=hide)["out"][:, :, :2]
    dirty = random_call(name, visible=hide, key=fill, value=fill)["out"]
    torch.testing.assert_close(dirty[:, :, :2], clean, rtol=1e-13, atol=1e-14)
    assert dirty[:, :, 2:].isnan().all()  # it is not swallowed where it is seen


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_the_definition_accepts_other_dtypes_as_the_plain_formula(name: str) -> None:
    function = DEFINITIONS[name]
    parameters, options = parameters_for(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        query, key, value = (torch.randn(1, 2, 3, 4).to(dtype) for _ in range(3))
        answer = call(
            function,
            query,
            key,
            value,
            options=options,
            parameters={n: x.to(dtype) for n, x in parameters.items()},
            positions=standing(3, 3, batch=1),
        )
        assert answer["out"].dtype == dtype


def test_a_class_is_judged_by_its_own_definition_before_that_of_its_formula() -> None:
    def mine() -> None: ...

    assert definition_of(type("V", (), {"formula": "additive", "definition": staticmethod(mine)})) is mine
    assert definition_of(type("V", (), {"formula": "additive", "definition": None})()) is additive


def test_a_formula_without_definition_is_named_with_the_nearest_ones() -> None:
    with pytest.raises(PluginError, match="'additiv' has no definition; did you mean 'additive'"):
        definition_of(type("V", (), {"formula": "additiv"}))


def test_a_definition_that_is_no_function_is_refused() -> None:
    with pytest.raises(PluginError, match="must be a function"):
        definition_of(type("V", (), {"definition": 3}))
