"""What a cell would need, before it is tried: measured points first, then the formula."""

import dataclasses

import pytest
import torch

from attnlab_evaluations.measure.estimates import Estimates, gibibytes, growth, operations
from attnlab_evaluations.tasks.compare.problems import Part, Problem, prepare


def calls(name, length, *, causal=False):
    part = Part(*(torch.randn(1, 2, length, 8) for _ in range(3)), causal=causal)
    return prepare(name, [part], seed=0, random_gates=True)


def problem(length):
    return Problem(coordinates={"length": length, "causal": False}, length=length, build=list)


def ok(**value):
    return {"status": "ok", "value": value}


@pytest.mark.parametrize(
    ("name", "slope"), [("dot_product", 2.0), ("additive", 2.0), ("linearised", 1.0), ("delta_rule", 1.0)]
)
def test_a_single_measured_point_grows_as_its_formula_does(name, slope):
    assert growth(calls(name, 1024)) == pytest.approx(slope, abs=0.05)


def test_a_linear_variants_slow_start_does_not_rule_it_out_at_greater_lengths():
    estimates = Estimates(100.0)
    estimates.learn(problem(256), "linearised", "forward", ok(median=0.1))
    found = estimates.seconds(problem(4096), "forward", "linearised", calls("linearised", 4096))
    assert found == pytest.approx(1.6, rel=0.1)


def test_two_measured_points_give_their_own_slope():
    estimates = Estimates(100.0)
    estimates.learn(problem(256), "a", "forward", ok(median=1.0))
    estimates.learn(problem(512), "a", "forward", ok(median=3.0))
    assert estimates.seconds(problem(1024), "forward", "a", None) == pytest.approx(9.0)


def test_a_backward_is_expected_from_the_forward_just_measured():
    estimates = Estimates(100.0)
    estimates.learn(problem(256), "a", "forward", ok(median=2.0))
    assert estimates.seconds(problem(256), "forward_backward", "a", None) == pytest.approx(7.0)


def test_before_anything_was_measured_the_machines_own_rate_is_the_bound():
    found = calls("dot_product", 64)
    flops, special = operations(found, "forward")
    expected = Estimates(2.0).seconds(problem(64), "forward", "dot_product", found)
    assert expected == pytest.approx(flops / 2e9 + special / 4e9)
    assert Estimates(2.0).seconds(problem(64), "forward", "unknown", None) == 0.0


def test_what_needs_more_memory_than_is_free_is_refused_with_both_numbers():
    estimates = Estimates(100.0, free=lambda _: 2**30)
    estimates.learn(problem(256), "a", "memory_forward", ok(bytes=2**29))
    square = calls("dot_product", 64)
    held = square.instances[0].capabilities
    square.instances[0].capabilities = dataclasses.replace(held, linear_memory=False)
    status, detail = estimates.refusal(problem(512), "forward", "a", square)
    assert (status, detail) == ("out of memory", "needs about 2 GiB, 1 GiB are free")
    assert estimates.refusal(problem(256), "forward", "a", square) is None
    assert estimates.refusal(problem(256), "forward", "a", square, beside=2**30) is not None


def test_memory_that_is_declared_linear_grows_so_from_a_single_measured_point():
    estimates = Estimates(100.0)
    estimates.learn(problem(32), "linearised", "memory_forward", ok(bytes=2**20))
    line = calls("linearised", 64)
    assert line.instances[0].capabilities.linear_memory
    assert estimates.extra_bytes(problem(32 * 2**10), "forward", "linearised", line) == 2**30


@pytest.mark.parametrize(
    ("count", "said"), [(2**29, "0.5 GiB"), (76.25 * 2**30, "76.2 GiB"), (12 * 2**40, "12,288 GiB"), (0, "0 GiB")]
)
def test_bytes_are_written_for_people(count, said):
    assert gibibytes(count) == said


def test_where_free_memory_is_unknown_nothing_is_refused():
    estimates = Estimates(100.0, free=lambda _: None)
    assert estimates.refusal(problem(10**6), "forward", "a", calls("dot_product", 64)) is None
