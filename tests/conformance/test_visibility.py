"""The scalar predicate, on matrices small enough to be written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlab.conformance.oracle.visibility import Rules, dense, positions


def matrix(queries: int, keys: int, **rules: Any) -> list[str]:
    """Rows of the only item and head, x where the query sees the key."""
    made = dense(Rules.of(batch=1, heads=1, queries=queries, keys=keys, **rules))[0, 0]
    return ["".join("x" if seen else "." for seen in row) for row in made.tolist()]


def test_without_rules_everything_is_visible() -> None:
    assert matrix(2, 3) == ["xxx", "xxx"]


def test_causal_at_one_length_is_the_lower_triangle() -> None:
    assert matrix(3, 3, causal=True) == ["x..", "xx.", "xxx"]


def test_bottom_right_at_5_queries_and_2_keys_leaves_three_rows_without_keys() -> None:
    """FAULTS B014."""
    assert matrix(5, 2, causal=True, offset="bottom_right") == ["..", "..", "..", "x.", "xx"]


def test_a_single_query_sees_8_keys_bottom_right_and_1_top_left() -> None:
    """FAULTS B013."""
    assert matrix(1, 8, causal=True, offset="bottom_right") == ["xxxxxxxx"]
    assert matrix(1, 8, causal=True, offset="top_left") == ["x......."]


def test_bottom_right_counts_valid_lengths_where_they_are_given() -> None:
    lengths = torch.tensor([3])
    assert matrix(2, 5, causal=True, offset="bottom_right", key_lengths=lengths) == ["xx...", "xxx.."]
    two = torch.tensor([1])
    assert matrix(2, 3, causal=True, offset="bottom_right", query_lengths=two) == ["xxx", "..."]


def test_an_int_and_a_tensor_offset_shift_the_queries() -> None:
    assert matrix(2, 3, causal=True, offset=1) == ["xx.", "xxx"]
    assert matrix(2, 3, causal=True, offset=torch.tensor([-1])) == ["...", "x.."]


def test_an_offset_alone_hides_nothing() -> None:
    assert matrix(2, 3, offset="bottom_right") == ["xxx", "xxx"]


def test_window_counts_are_inclusive_and_none_is_unbounded() -> None:
    assert matrix(4, 4, window=(1, 0)) == ["x...", "xx..", ".xx.", "..xx"]
    assert matrix(3, 3, window=(0, 0)) == ["x..", ".x.", "..x"]
    assert matrix(3, 3, window=(None, 1)) == ["xx.", "xxx", "xxx"]


def test_unequal_lengths_need_an_offset_for_causal() -> None:
    with pytest.raises(ValueError, match="offset"):
        matrix(2, 3, causal=True)


def test_key_mask_hides_columns_on_either_side() -> None:
    assert matrix(2, 3, key_mask=torch.tensor([[False, True, True]])) == [".xx", ".xx"]


def test_query_lengths_empty_the_rows_past_them() -> None:
    assert matrix(3, 2, query_lengths=torch.tensor([2])) == ["xx", "xx", ".."]


def test_segments_see_themselves_and_minus_one_is_absent() -> None:
    ids = torch.tensor([[0, 0, 1, -1]])
    assert matrix(4, 4, segments=(ids, ids)) == ["xx..", "xx..", "..x.", "...."]


def test_positions_and_alignment_restart_in_each_segment() -> None:
    query_ids, key_ids = torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1, 1, 1]])
    rules = {"segments": (query_ids, key_ids), "causal": True}
    assert matrix(3, 5, offset="top_left", **rules) == ["x....", "..x..", "..xx."]
    assert matrix(3, 5, offset="bottom_right", **rules) == ["xx...", "..xx.", "..xxx"]
    made = Rules.of(batch=1, heads=1, queries=3, keys=5, offset="bottom_right", **rules)
    q, k = positions(made)
    assert q.tolist() == [[1, 1, 2]]
    assert k.tolist() == [[0, 1, 0, 1, 2]]


def test_parts_combine_with_and() -> None:
    allowed = torch.tensor([[True, True, True], [False, True, True], [True, True, False]])
    assert matrix(3, 3, causal=True, mask=allowed) == ["x..", ".x.", "xx."]


def test_a_mask_with_four_axes_broadcasts() -> None:
    allowed = torch.tensor([True, False]).view(2, 1, 1, 1)
    made = dense(Rules.of(batch=2, heads=2, queries=1, keys=3, mask=allowed))
    assert made[0].all()
    assert not made[1].any()


def test_mask_mod_is_handed_positions() -> None:
    assert matrix(2, 3, offset=1, mask_mod=lambda b, h, q, k: q == k) == [".x.", "..x"]
