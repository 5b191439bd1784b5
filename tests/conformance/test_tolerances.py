"""The bounds: measured error twice, plus what rounding explains, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from attnlab.conformance.compare.tolerances import (
    UNIT,
    accumulation_unit,
    bound,
    derived,
    differences,
    gamma,
    largest,
    largest_error,
)

F64 = torch.float64


def test_unit_roundoffs_are_half_of_epsilon() -> None:
    assert UNIT == {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def test_sums_are_judged_in_float32_or_better() -> None:
    assert accumulation_unit("bfloat16") == accumulation_unit("float16") == UNIT["float32"]
    assert accumulation_unit("float64") == UNIT["float64"]


def test_gamma_bounds_the_error_of_a_float32_dot_product() -> None:
    g = torch.Generator().manual_seed(0)
    for n in (3, 100, 5000):
        a, b = torch.rand(n, generator=g), torch.rand(n, generator=g)
        exact = (a.double() * b.double()).sum()
        assert abs(float((a * b).sum().double() - exact)) <= gamma(n, UNIT["float32"]) * float(exact)


def test_the_bound_is_twice_the_measured_error_plus_the_derived_part() -> None:
    exact, plain = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([1.0, 2.25])
    made = bound("float32", exact=exact, plain=plain, plain_dtype="float32", terms=10, magnitude=3.0)
    assert made.limit == pytest.approx(2 * 0.25 + derived("float32", 10, 3.0), rel=1e-12)
    assert "2 x 2.50e-01" in made.origin


def test_in_float64_the_float32_error_stands_in_scaled_by_the_units() -> None:
    exact, plain = torch.tensor([1.0], dtype=F64), torch.tensor([1.0 + 2.0**-20])
    made = bound("float64", exact=exact, plain=plain, plain_dtype="float32", terms=10)
    assert made.limit == pytest.approx(2 * 2.0**-20 * 2.0**-29 + derived("float64", 10, 1.0), rel=1e-9)
    assert "measured in float32" in made.origin


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_plain_formula_that_overflows_excuses_nothing(broken: float) -> None:
    exact = torch.ones(1, dtype=F64)
    made = bound("float16", exact=exact, plain=torch.tensor([broken]), plain_dtype="float16", terms=10)
    assert made.limit == derived("float16", 10, 1.0)


def test_equal_infinities_agree_and_nan_never_does() -> None:
    a = torch.tensor([math.inf, -math.inf, math.nan, 1.0, math.inf])
    b = torch.tensor([math.inf, -math.inf, math.nan, 1.5, -math.inf])
    assert differences(a, b).tolist() == [0.0, 0.0, math.inf, 0.5, math.inf]
    assert largest_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_largest_looks_at_finite_numbers_only() -> None:
    assert largest(torch.tensor([1.0, -3.0, math.inf, math.nan])) == 3.0
    assert largest(torch.tensor([math.nan])) == 0.0
