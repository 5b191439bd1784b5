"""FLOPs and visible pairs against brute force, and the closed forms of the literature."""

import itertools
import time

import pytest

import attnlab
from attnlab_evaluations.measure import costs

SIZES = {"batch": 2, "num_heads": 3, "query_length": 9, "key_length": 9, "key_dim": 4, "value_dim": 5}


@pytest.mark.parametrize(("n_q", "n_k"), list(itertools.product([0, 1, 2, 5, 7], repeat=2)))
def test_visible_pairs_equal_a_count_one_by_one(n_q, n_k):
    sides = (None, 0, 1, 3, 9)
    for causal, offset, left, right in itertools.product((False, True), range(-4, 5), sides, sides):
        counted = sum(
            (not causal or j <= i + offset)
            and (left is None or j >= i + offset - left)
            and (right is None or j <= i + offset + right)
            for i in range(n_q)
            for j in range(n_k)
        )
        found = costs.visible_pairs(n_q, n_k, causal=causal, offset=offset, window=(left, right))
        assert found == counted, (causal, offset, left, right)


def test_a_million_tokens_cost_as_little_to_count_as_ten():
    began = time.process_time()
    assert costs.visible_pairs(10**6, 10**6, causal=True) == 10**6 * (10**6 + 1) // 2
    assert time.process_time() - began < 1.0  # a loop over pairs would take days


def test_causal_pairs_are_exactly_l_plus_one_over_two_l_of_all():
    assert costs.visible_pairs(9, 9, causal=True) * 2 * 9 == costs.visible_pairs(9, 9) * (9 + 1)


def test_softmax_flops_are_two_products_over_the_visible_pairs():
    found = costs.forward_cost("softmax_dot_product", **SIZES)
    assert found.flops == 2 * 3 * 2 * 9 * 9 * (4 + 5)
    counted = costs.forward_cost("softmax_dot_product", **{**SIZES, "batch": 2, "num_heads": 5, "value_dim": 4})
    assert counted.flops == 4 * 2 * 5 * 9 * 9 * 4  # 4 B H L S D


def counted_by_loops(formula, n_q, n_k, d, e, hidden, causal):
    """FLOPs of the plain formula, one scalar operation at a time, for one head."""
    flops = special = 0
    project = {"additive": (n_q + n_k) * hidden * d, "general": n_q * d * d}.get(formula, 0)
    flops += 2 * project
    for i in range(n_q):
        for j in range(n_k):
            if causal and j > i:
                continue
            special += 1
            for _ in range(e):
                flops += 2
            if formula == "additive":
                for _ in range(hidden):
                    flops += 4
                    special += 1
            else:
                for _ in range(d):
                    flops += 2
    return flops, special


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("formula", "options", "loop"),
    [
        ("softmax_dot_product", {}, "dot"),
        ("additive", {"hidden_size": 6}, "additive"),
        ("multiplicative", {"score": "general"}, "general"),
        ("multiplicative", {"score": "dot"}, "dot"),
    ],
)
def test_flops_equal_a_count_by_loops(formula, options, loop, causal):
    found = costs.forward_cost(formula, **{**SIZES, "batch": 1, "num_heads": 1}, causal=causal, options=options)
    assert (found.flops, found.special) == counted_by_loops(loop, 9, 9, 4, 5, options.get("hidden_size", 4), causal)


def test_linear_flops_grow_linearly_and_the_causal_form_adds_its_chunks():
    def at(length, causal):
        sizes = {**SIZES, "query_length": length, "key_length": length}
        return costs.forward_cost("linearised", **sizes, causal=causal, chunk=8).flops

    assert at(64, False) * 4 == at(256, False)
    assert at(64, True) * 4 == at(256, True)
    assert at(64, True) - at(64, False) == 6 * 64 * 8 * (4 + 5)  # heads x L C (p + e)


@pytest.mark.parametrize("name", [name for name in attnlab.names() if name.startswith("linearised")])
def test_linear_flops_are_those_of_the_features_that_the_variant_makes(name):
    made = attnlab.create(name, num_heads=6, head_dim=4, value_dim=5)
    found = costs.forward_cost("linearised", **SIZES, options=made.options)
    assert found.flops == 6 * 4 * 9 * made.num_features() * 5


def test_a_delta_rule_token_costs_three_products_with_the_state():
    assert costs.forward_cost("delta_rule", **SIZES).flops == 6 * 9 * 3 * 2 * 4 * 5


def test_bytes_are_the_tensors_that_must_move():
    found = costs.forward_cost("softmax_dot_product", **SIZES, itemsize=2)
    q, k, v, o = 9 * 4, 9 * 4, 9 * 5, 9 * 5
    assert found.bytes_forward == 6 * 2 * (q + k + v + o)
    assert found.bytes_backward == 6 * 2 * ((q + k + v) + o + (q + k + v))


def test_an_unknown_formula_has_no_cost_rather_than_a_guess():
    assert costs.forward_cost("somebody's own", **SIZES) is None


def test_a_quadratic_estimate_holds_the_square_and_a_linear_one_does_not():
    sizes = {**SIZES, "query_length": 4096, "key_length": 4096}
    square = 6 * 4096 * 4096 * 4
    assert costs.memory_estimate(**sizes, linear_memory=False, backward=False) > square
    assert costs.memory_estimate(**sizes, linear_memory=True, backward=True) < square


def test_extrapolation_follows_the_last_two_points():
    assert costs.extrapolate({}, 1024, default=2.0) == 0.0
    assert costs.extrapolate({512: 1.0}, 1024, default=2.0) == pytest.approx(4.0)
    assert costs.extrapolate({256: 1.0, 512: 2.0}, 2048, default=2.0) == pytest.approx(8.0)


def test_extrapolation_does_not_believe_a_slope_below_linear_or_above_its_bound():
    assert costs.extrapolate({256: 1.0, 512: 1.0}, 1024, default=2.0) == pytest.approx(2.0)
    assert costs.extrapolate({256: 1.0, 512: 100.0}, 1024, default=2.0, high=2.0) == pytest.approx(400.0)
