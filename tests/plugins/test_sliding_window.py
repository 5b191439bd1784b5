"""sliding_window: a window of its own, counted as `window=` counts, whatever else is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, UnsupportedRequest, attend, create, run_checks
from attnlab_plugins.sliding_window import SlidingWindowAttention

SIZES = {"num_heads": 2, "head_dim": 8}


def seen(variant: Any, length: int, **arguments: Any) -> Tensor:
    """Which keys each query sees, `[L, L]`, read off with values that are unit vectors."""
    x = torch.randn(1, 1, length, 8)
    eye = torch.eye(length)[None, None]
    return variant(x, x, eye, **arguments).out[0, 0] > 0


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("length", [16, 600])
def test_a_causal_window_of_w_shows_w_keys_with_the_querys_own(window: int, length: int) -> None:
    variant = create("sliding_window", num_heads=1, head_dim=8, value_dim=length, left=window - 1, right=0)
    counts = seen(variant, length).sum(-1)
    assert torch.equal(counts, torch.arange(1, length + 1).clamp(max=window))


def test_a_symmetric_window_with_sink_tokens_row_by_row() -> None:
    variant = create("sliding_window", num_heads=1, head_dim=8, value_dim=9, left=1, right=2, sink_tokens=2)
    got = seen(variant, 9)
    assert got[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert got[5].nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 7]
    assert got[8].nonzero().flatten().tolist() == [0, 1, 7, 8]
    causal = seen(variant, 9, causal=True)
    assert causal[5].nonzero().flatten().tolist() == [0, 1, 4, 5]


def test_the_callers_window_and_its_own_are_both_kept() -> None:
    variant = create("sliding_window", num_heads=1, head_dim=8, value_dim=9, left=2, right=0, sink_tokens=1)
    assert seen(variant, 9, window=(1, None))[6].nonzero().flatten().tolist() == [5, 6]
    assert seen(variant, 9, window=(5, None))[6].nonzero().flatten().tolist() == [4, 5, 6]
    assert seen(variant, 9, window=(6, None))[6].nonzero().flatten().tolist() == [0, 4, 5, 6]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"need_weights": True},
        {"need_lse": True},
        {"softcap": 5.0},
        {"sinks": torch.zeros(2)},
        {"bias": torch.zeros(1, 1, 1, 1)},
        {"mask": torch.ones(600, 600, dtype=torch.bool)},
        {"mask_mod": lambda b, h, q, k: q >= 0},
        {"key_mask": torch.ones(1, 600, dtype=torch.bool)},
        {"segments": (torch.zeros(1, 600, dtype=torch.long),) * 2},
    ],
    ids=lambda a: next(iter(a), "plain"),
)
def test_a_token_that_the_window_has_left_moves_nothing_on_any_path(asked: dict[str, Any]) -> None:
    variant = create("sliding_window", **SIZES, left=7, right=0)
    x = torch.randn(1, 2, 600, 8)
    moved = x.clone()
    moved[:, :, 100] += 5
    before, after = (variant(x, k, k, **asked).out for k in (x, moved))
    changed = (before != after).any(-1).any(1)[0].nonzero().flatten().tolist()
    assert changed == list(range(100, 108))


def test_decoding_token_by_token_gives_the_whole() -> None:
    variant = create("sliding_window", **SIZES, left=5, right=0, sink_tokens=2)
    x = torch.randn(2, 2, 40, 8, dtype=torch.float64)
    whole = variant(x, x, x).out
    state, steps = variant.init_state(2, dtype=torch.float64), []
    for t in range(40):
        token = x[:, :, t : t + 1]
        answer = variant(token, token, token, state=state)
        state = answer.state
        steps.append(answer.out)
    torch.testing.assert_close(torch.cat(steps, 2), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", [{"left": -1}, {"right": -2}, {"left": None}, {"sink_tokens": True}, {"left": 2.5}])
def test_a_window_that_is_no_count_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"sliding_window.*: \w+ must be an int of 0 or more, .* got "):
        create("sliding_window", **SIZES, **options)


def test_a_window_wider_than_the_input_is_dot_product() -> None:
    x = torch.randn(1, 2, 50, 8)
    torch.testing.assert_close(
        attend(x, x, x, "sliding_window", causal=True).out, attend(x, x, x, "dot_product", causal=True).out
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"left": 3, "right": 1, "sink_tokens": 2},
        {"left": 2, "right": 0},
        {"left": 0, "right": 0, "sink_tokens": 1},
        {"left": 40, "right": 40},
    ],
    ids=str,
)
def test_every_check_passes_with_windows_smaller_than_its_inputs(options: dict[str, int]) -> None:
    results = run_checks(create("sliding_window", **SIZES, **options))
    assert not [f"{r.check} [{r.case}]: {r.message}" for r in results if not r.ok]


def test_windows_of_windows_hide_what_either_hides() -> None:
    class Nearer(SlidingWindowAttention):
        def attend(self, query, key, value, call):  # type: ignore[no-untyped-def]
            return super().attend(query, key, value, call.within(query, key, left=3, right=None))

    variant = Nearer(num_heads=1, head_dim=8, value_dim=8, left=5, right=0, sink_tokens=2)
    assert seen(variant, 8)[7].nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_lengths_that_differ_are_left_to_the_window_of_the_call() -> None:
    variant = create("sliding_window", **SIZES)
    with pytest.raises(UnsupportedRequest, match="its window would have two readings"):
        variant(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
