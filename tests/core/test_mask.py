"""AttentionMask against the scalar predicate of the conformance suite, on random combinations of its parts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from attnlab import AttentionMask, InvalidInput
from attnlab.conformance.oracle.visibility import Rules, dense

BATCH, HEADS = 2, 2


def rows(elements: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[list[list[Any]]]:
    one = st.lists(elements, min_size=length, max_size=length)
    return st.lists(one, min_size=BATCH, max_size=BATCH)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes and any combination of parts that is legal."""
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    chosen: dict[str, Any] = {"queries": queries, "keys": keys}

    def maybe(name: str, strategy: st.SearchStrategy[Any], convert: Any = lambda x: x) -> None:
        if draw(st.booleans()):
            chosen[name] = convert(draw(strategy))

    bound = st.one_of(st.none(), st.integers(0, 4))
    maybe("causal", st.just(True))
    maybe("window", st.tuples(bound, bound))
    offsets = st.one_of(
        st.sampled_from(["top_left", "bottom_right"]),
        st.integers(-5, 5),
        st.lists(st.integers(-5, 5), min_size=BATCH, max_size=BATCH).map(torch.tensor),
    )
    if queries != keys and (chosen.get("causal") or chosen.get("window", (None, None)) != (None, None)):
        chosen["offset"] = draw(offsets)
    else:
        maybe("offset", offsets)
    maybe("key_mask", rows(st.booleans(), keys), torch.tensor)
    lengths = {"key_lengths": keys, "query_lengths": queries}
    for name, limit in lengths.items():
        maybe(name, st.lists(st.integers(0, limit), min_size=BATCH, max_size=BATCH), torch.tensor)
    if draw(st.booleans()):
        ids = st.integers(-1, 2)
        chosen["segments"] = tuple(torch.tensor(sorted_rows(draw(rows(ids, n)))) for n in (queries, keys))
    if draw(st.booleans()):
        shape = draw(
            st.sampled_from(
                [(queries, keys), (BATCH, 1, queries, keys), (1, HEADS, 1, keys), (BATCH, HEADS, queries, 1)]
            )
        )
        bits = draw(st.integers(0, 2**32 - 1))
        chosen["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(bits)) < 0.6
    maybe("mask_mod", st.just(lambda b, h, q, k: (q + 2 * k + b + h) % 3 != 0))
    return chosen


def sorted_rows(ids: list[list[int]]) -> list[list[int]]:
    """Segments lie side by side; the absent ones may stand at either end."""
    return [sorted(row) if index % 2 else sorted(row, key=lambda i: (i < 0, i)) for index, row in enumerate(ids)]


def as_mask(chosen: dict[str, Any]) -> AttentionMask:
    stated = {("allowed" if n == "mask" else n): x for n, x in chosen.items() if n not in ("queries", "keys")}
    return AttentionMask(**stated)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(parts())
def test_to_dense_equals_the_scalar_predicate_for_every_pair(chosen: dict[str, Any]) -> None:
    expected = dense(Rules.of(batch=BATCH, heads=HEADS, **chosen))
    got = as_mask(chosen).to_dense(BATCH, HEADS, chosen["queries"], chosen["keys"], "cpu")
    assert torch.equal(got.expand_as(expected), expected)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts())
def test_a_mask_flattened_and_rebuilt_says_the_same(chosen: dict[str, Any]) -> None:
    mask = as_mask(chosen)
    leaves, spec = pytree.tree_flatten(mask)
    again = pytree.tree_unflatten(leaves, spec)
    sizes = (BATCH, HEADS, chosen["queries"], chosen["keys"])
    assert torch.equal(mask.to_dense(*sizes), again.to_dense(*sizes))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts())
def test_every_tile_is_that_part_of_the_whole(chosen: dict[str, Any]) -> None:
    from attnlab import Visibility

    lq, lk = chosen["queries"], chosen["keys"]
    seen = Visibility.resolve(
        as_mask(chosen), batch=BATCH, num_heads=HEADS, query_length=lq, key_length=lk, device=torch.device("cpu")
    )
    # Rows of absent queries are the gate's to zero: tiles speak of present queries only.
    whole = seen.dense().expand(BATCH, HEADS, lq, lk)
    for q0 in range(0, lq, 2):
        for k0 in range(0, lk, 2):
            q1, k1 = min(q0 + 2, lq), min(k0 + 2, lk)
            part = whole[:, :, q0:q1, k0:k1]
            tile = seen.tile(q0, q1, k0, k1)
            assert torch.equal(part, torch.ones_like(part) if tile is None else tile.expand_as(part))
            kind = seen.kind(q0, q1, k0, k1)
            assert kind in ("empty", "full", "partial")
            if kind == "empty":
                assert not part.any()
            if kind == "full":
                assert part.all()


def test_the_same_rule_given_twice_is_refused_by_name() -> None:
    one = AttentionMask(causal=True, window=(1, 1))
    with pytest.raises(InvalidInput, match="window given twice"):
        one.merged(AttentionMask(window=(2, 2)))


def test_merging_keeps_the_parts_of_both() -> None:
    both = AttentionMask(causal=True).merged(AttentionMask(window=(1, None)))
    assert both.given() == ["causal", "window"]


def test_a_mask_is_frozen_and_compares_by_identity() -> None:
    mask = AttentionMask(causal=True)
    with pytest.raises(AttributeError):
        mask.causal = False  # type: ignore[misc]
    assert mask != AttentionMask(causal=True)


def test_a_mask_pickles() -> None:
    mask = AttentionMask(causal=True, key_lengths=torch.tensor([1, 3]))
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.to_dense(2, 1, 3, 3), mask.to_dense(2, 1, 3, 3))


def test_packed_lengths_become_segments_and_the_tail_is_absent() -> None:
    mask = AttentionMask.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), query_length=4, key_length=4)
    rows_ = mask.to_dense(1, 1, 4, 4)[0, 0].int().tolist()
    assert rows_ == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"causal": 1}, "causal must be True or False"),
        ({"causal": "bottom_right"}, "alignment goes into offset="),
        ({"offset": "bottom-right"}, "offset must be 'top_left', 'bottom_right'"),
        ({"offset": 1.5}, "offset must be"),
        ({"offset": torch.tensor([0.5])}, "integer tensor"),
        ({"window": 3}, r"window must be \(left, right\)"),
        ({"window": (-1, 0)}, "window left must be 0"),
        ({"window": (0, 1.5)}, "window right must be an int"),
        ({"key_mask": torch.ones(2, 3)}, "key_mask must be a bool tensor"),
        ({"key_mask": torch.ones(3, dtype=torch.bool)}, r"key_mask must be \[B, Lk\]"),
        ({"key_lengths": torch.tensor([1.0])}, "key_lengths must be an integer tensor"),
        ({"allowed": torch.zeros(2, 2)}, "bias="),
        ({"segments": torch.zeros(2, 3)}, r"segments must be \(query_ids, key_ids\)"),
        ({"mask_mod": True}, "mask_mod must be a function"),
    ],
)
def test_a_part_of_the_wrong_kind_is_refused_with_a_sentence(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AttentionMask(**stated)


@pytest.mark.parametrize("lengths", [[-1, 2], [0, 4]])
def test_validate_reads_values_and_names_the_one_out_of_range(lengths: list[int]) -> None:
    mask = AttentionMask(key_lengths=torch.tensor(lengths))
    with pytest.raises(InvalidInput, match=r"key_lengths must lie in 0 to 3"):
        mask.validate(2, 1, 3, 3)


def test_a_mask_with_three_axes_is_refused_with_both_readings() -> None:
    mask = AttentionMask(allowed=torch.ones(2, 3, 4, dtype=torch.bool))
    with pytest.raises(InvalidInput, match=r"mask\[:, None\].*mask\[None\]"):
        mask.to_dense(2, 2, 3, 4)
