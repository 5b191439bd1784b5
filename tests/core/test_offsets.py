"""An offset says where queries stand; where nothing reads that, it is refused. F17."""

from typing import Any

import pytest
import torch

import attnlab
from attnlab import AttentionMask, InvalidInput

FREE = ["dot_product", "chunked", "flash", "linearised"]


def tokens(queries: int = 5, keys: int = 5) -> list[torch.Tensor]:
    return [torch.randn(2, 2, n, 4) for n in (queries, keys, keys)]


OFFSETS: dict[str, Any] = {
    "an int": 3,
    "an int below 0": -1,
    "a tensor": torch.tensor([1, 2]),
    "a number in a tensor": torch.tensor(0),
}


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("variant", FREE)
def test_an_offset_that_nothing_reads_is_refused_at_every_entrance(variant: str, offset: str) -> None:
    given, x = OFFSETS[offset], tokens()
    made = attnlab.create(variant, num_heads=2, head_dim=4)
    wide = attnlab.MultiHeadAttention(8, 2, variant=variant)
    calls = [
        lambda: attnlab.attend(*x, variant, offset=given),
        lambda: attnlab.attention(*x, variant, offset=given),
        lambda: made(*x, offset=given),
        lambda: made(*x, mask=AttentionMask(offset=given)),
        lambda: made(*x, mask=AttentionMask(offset=given).keeping()),
        lambda: wide(torch.randn(2, 5, 8), offset=given),
    ]
    if hasattr(made, "precompute"):
        calls.append(lambda: made.precompute(x[1])(x[0], x[2], offset=given))
    for call in calls:
        with pytest.raises(InvalidInput, match="offset says where queries stand"):
            call()


def test_lengths_that_differ_leave_no_offset_without_a_reader() -> None:
    for offset in ("top_left", "bottom_right", 0):
        with pytest.raises(InvalidInput, match="offset says where queries stand"):
            attnlab.attend(*tokens(3, 5), offset=offset)


@pytest.mark.parametrize(
    ("variant", "options"),
    [("multiplicative", {}), ("multiplicative_location", {}), ("multiplicative_local_p", {}), ("additive", {})],
)
def test_variants_that_do_not_read_where_queries_stand_refuse_it(variant: str, options: dict[str, Any]) -> None:
    made = attnlab.create(variant, num_heads=2, head_dim=4, **options)
    with pytest.raises(InvalidInput, match="offset says where queries stand"):
        made(*tokens(), offset=3)


@pytest.mark.parametrize("offset", ["top_left", "bottom_right", 0])
def test_what_holds_without_it_may_be_said(offset: str | int) -> None:
    x = tokens()
    assert torch.equal(attnlab.attention(*x, offset=offset), attnlab.attention(*x))


def test_a_state_may_be_told_where_it_stands_and_nothing_else() -> None:
    made, x = attnlab.create("dot_product", num_heads=2, head_dim=4), tokens()
    for offset in (5, "bottom_right"):
        state = made(*x, state=made.init_state(2)).state
        assert made(*x, state=state, offset=offset).state.length == 10
    state = made(*x, state=made.init_state(2)).state
    with pytest.raises(InvalidInput, match="offset says where queries stand"):
        made(*x, state=state, offset=4)


@pytest.mark.parametrize(
    "reader",
    [
        {"causal": True},
        {"window": (1, 1)},
        {"mask_mod": lambda b, h, q, k: k <= q},
        {"score_mod": lambda s, b, h, q, k: s - 0.3 * (q - k).abs()},
    ],
    ids=lambda reader: next(iter(reader)),
)
def test_a_rule_of_the_call_reads_it(reader: dict[str, Any]) -> None:
    x = tokens()
    assert not torch.equal(attnlab.attention(*x, **reader, offset=2), attnlab.attention(*x, **reader, offset=0))


@pytest.mark.parametrize(
    "chosen",
    [
        {"name": "sliding_window", "left": 2, "right": 1},
        {"name": "multiplicative_local_m", "half_width": 1},
        "linearised_cosformer",
    ],
    ids=str,
)
def test_a_variant_that_reads_where_queries_stand_uses_it(chosen: Any) -> None:
    name, options = (chosen, {}) if isinstance(chosen, str) else (chosen["name"], dict(chosen))
    options.pop("name", None)
    made, x = attnlab.create(name, num_heads=2, head_dim=4, **options), tokens()
    assert not torch.equal(made(*x, offset=2).out, made(*x).out)


def test_a_window_without_bounds_is_a_rule_that_counts_from_the_offset() -> None:
    """F17: callers hand on `window=(left, right)` whatever their settings, `(None, None)` among them."""
    query, key, value = tokens(3, 5)
    got = attnlab.attention(query, key, value, window=(None, None), offset=2)
    torch.testing.assert_close(got, attnlab.attention(query, key, value))
