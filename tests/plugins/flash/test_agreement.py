"""Out and gradients of the kernels against the float64 definition, within the bounds of `attnlab.conformance.compare.tolerances`.

The kernels' tiles are 16 by 16 here: 17 tokens are two tiles with one row in the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnlab.conformance.checks.definition import check_gradients_match_definition
from attnlab.conformance.oracle.cases import Case, case, pairs, singles

LENGTHS = (1, 7, 16, 17, 33, 65, 137)
WIDTHS = (16, 24, 40, 64, 80, 96, 128, 256)
ONE = {"batch": 1, "num_heads": 1, "num_kv_heads": 1}
UNSERVED = {"mask_mod", "score_mod", "query_dim"}


def two_tiles(c: Case) -> Case:
    """The case with each length some tiles longer, and other tails: 7 -> 23, 5 -> 21, 9 -> 25; one query stays one."""
    longer = {n: getattr(c, n) + 16 for n in ("query_length", "key_length") if getattr(c, n) > 1}
    return replace(c, **longer)


def served(cases: Any) -> list[Case]:
    return [two_tiles(c) for c in cases if not UNSERVED & set(c.features)]


SINGLES = served(singles())
PAIRS = served(pairs())
STRIDE = 13  # a prime: every label is met


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("features", [(), ("causal",)], ids=["plain", "causal"])
def test_every_length_has_its_tail(make: Any, length: int, features: tuple[str, ...]) -> None:
    c = case(*features, **ONE, query_length=length, key_length=length)
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.parametrize("lengths", [(1, 33), (17, 40), (40, 17), (65, 7)], ids=str)
@pytest.mark.parametrize("features", [(), ("bottom_right",)], ids=["plain", "bottom_right"])
def test_queries_and_keys_may_differ_in_number(make: Any, lengths: tuple[int, int], features: tuple[str, ...]) -> None:
    c = case(*features, **ONE, query_length=lengths[0], key_length=lengths[1])
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_width_counts_whole_and_no_further(make: Any, width: int, dtype: str) -> None:
    widths = {"head_dim": width, "key_dim": width, "value_dim": width}
    c = case("causal", **{**ONE, **widths}, query_length=19, key_length=19, dtype=dtype)
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.parametrize("widths", [(8, 16), (16, 8), (5, 7), (24, 80), (128, 40)], ids=str)
def test_values_may_have_a_width_of_their_own(make: Any, widths: tuple[int, int]) -> None:
    sizes = {**ONE, "head_dim": widths[0], "key_dim": widths[0], "value_dim": widths[1]}
    c = case("causal", **sizes, query_length=19, key_length=19)
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.parametrize("c", SINGLES, ids=lambda c: c.id)
def test_every_feature_is_the_definitions(make: Any, c: Case) -> None:
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.parametrize("c", PAIRS[::STRIDE], ids=lambda c: c.id)
def test_features_combine(make: Any, c: Case) -> None:
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.full
@pytest.mark.parametrize("c", [c for n, c in enumerate(PAIRS) if n % STRIDE], ids=lambda c: c.id)
def test_every_two_features_combine(make: Any, c: Case) -> None:
    check_gradients_match_definition(make(**c.geometry), c)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("c", SINGLES, ids=lambda c: c.id)
def test_every_feature_is_the_definitions_in_half_precision(make: Any, c: Case, dtype: str) -> None:
    check_gradients_match_definition(make(**c.geometry), replace(c, dtype=dtype))
