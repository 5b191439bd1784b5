"""A row with padding on its left is the row alone, for formulas that read where a sequence begins. F04."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import AttentionMask, create
from attnlab.families.feature_map import FEATURE_MAP_CAPABILITIES
from attnlab.visibility import Visibility

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
PADS = (0, 3, 14, 25)


def rows(length: int, seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(len(PADS), 2, length, 4, dtype=torch.float64, generator=drawn) for _ in range(3)]


def present(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor(PADS)[:, None]


def alone(variant: Any, inputs: list[Tensor], b: int, **arguments: Any) -> Any:
    cut = [x[b : b + 1, :, PADS[b] :] for x in inputs]
    return variant(*cut, causal=True, **arguments)


@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("sizes", [[1] * 40, [16] + [1] * 24, [5, 5, 5, 5, 10, 3, 1, 1, 5], [30, 10]])
@pytest.mark.parametrize(("left", "sinks"), [(3, 2), (0, 1), (2, 6)])
def test_a_windows_state_keeps_each_rows_own_sink_tokens(
    left: int, sinks: int, sizes: list[int], capacity: int | None
) -> None:
    variant = create("sliding_window", num_heads=2, head_dim=4, left=left, sink_tokens=sinks)
    n, inputs, bias = 40, rows(40), torch.randn(len(PADS), 2, 40, 40, dtype=torch.float64)
    score_mod = lambda s, b, h, q, k: s + 0.02 * k * (b + 1)  # noqa: E731
    for more in ({}, {"bias": bias}, {"score_mod": score_mod}, {"window": (left + 20, None)}):
        state, at, outs, weights = variant.init_state(len(PADS), capacity, dtype=torch.float64), 0, [], []
        for size in sizes:
            stop = at + size
            asked = {**more, "bias": bias[..., at:stop, :stop]} if "bias" in more else more
            answer = variant(
                *(x[:, :, at:stop] for x in inputs),
                causal=True,
                state=state,
                key_mask=present(n)[:, at:stop],
                need_weights=True,
                **asked,
            )
            state, at = answer.state, stop
            outs.append(answer.out)
            weights.append(torch.nn.functional.pad(answer.weights, (0, n - stop)))
        assert state.held <= sinks + left + sizes[-1]
        for b, pad in enumerate(PADS):
            asked = {**more, "bias": bias[b : b + 1, :, pad:, pad:]} if "bias" in more else more
            if "score_mod" in more:  # a caller's function is handed places in the padded row
                asked = {"score_mod": lambda s, _, h, q, k, b=b, pad=pad: s + 0.02 * (k + pad) * (b + 1)}
            wanted = alone(variant, inputs, b, need_weights=True, **asked)
            torch.testing.assert_close(torch.cat(outs, 2)[b : b + 1, :, pad:], wanted.out, **CLOSE)
            got = torch.cat(weights, 2)[b : b + 1, :, pad:]
            torch.testing.assert_close(got[..., pad:], wanted.weights, **CLOSE)
            assert not got[..., :pad].any()


def test_states_in_another_order_keep_them() -> None:
    variant = create("sliding_window", num_heads=2, head_dim=4, left=2, sink_tokens=2)
    inputs, order = rows(40), torch.tensor([3, 1, 1, 0])
    first = variant(
        *(x[:, :, :35] for x in inputs),
        causal=True, state=variant.init_state(4, dtype=torch.float64), key_mask=present(35),
    )  # fmt: skip
    state = first.state
    for at in range(35, 38):
        state = variant(*(x[:, :, at : at + 1] for x in inputs), causal=True, state=state).state
    state = state.reorder(order)
    got = variant(*(x[order, :, 38:] for x in inputs), causal=True, state=state).out
    for place, b in enumerate(order.tolist()):
        wanted = alone(variant, inputs, b).out[:, :, -2:]
        torch.testing.assert_close(got[place : place + 1], wanted, **CLOSE)


@pytest.mark.parametrize(("left", "right", "sinks"), [(40, 0, 3), (9, 5, 40), (17, 0, 1)])
def test_the_banded_engine_forward_and_backward(left: int, right: int, sinks: int) -> None:
    """Long enough for bands; padding longer than a block, and a row that has fewer tokens than sink tokens."""
    n, pads = 600, (0, 45, 581)
    variant = create(
        "sliding_window", num_heads=2, num_kv_heads=1, head_dim=4, left=left, right=right, sink_tokens=sinks
    )
    drawn = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, h, n, 4, dtype=torch.float64, generator=drawn).requires_grad_() for h in (2, 1, 1)]
    slope = torch.randn(3, 2, n, 4, dtype=torch.float64, generator=drawn)
    there = torch.arange(n) >= torch.tensor(pads)[:, None]
    out = variant(*inputs, key_mask=there).out
    grads = torch.autograd.grad((out * slope * there[:, None, :, None]).sum(), inputs)
    for b, pad in enumerate(pads):
        own = [x[b : b + 1, :, pad:].detach().clone().requires_grad_() for x in inputs]
        wanted = variant(*own).out
        torch.testing.assert_close(out[b : b + 1, :, pad:], wanted, **CLOSE)
        slopes = torch.autograd.grad((wanted * slope[b : b + 1, :, pad:]).sum(), own)
        for got, want in zip(grads, slopes, strict=True):
            torch.testing.assert_close(got[b : b + 1, :, pad:], want, **CLOSE)


@pytest.mark.parametrize("window", [(60, None), (20, 4), (5, None)])
def test_a_window_of_the_call_bounds_sink_tokens_too(window: tuple[int, int | None]) -> None:
    """At lengths that take tiles; the caller's bound exempts no token."""
    n = 700
    variant = create("sliding_window", num_heads=1, head_dim=4, left=9, right=2, sink_tokens=3)
    x = torch.randn(1, 1, n, 4, dtype=torch.float64)
    at = torch.arange(n)
    for pad in (0, 30):
        there = (at >= pad)[None]
        near = (at >= at[:, None] - 9) | (at < pad + 3)
        near = near & (at <= at[:, None] + min(2, window[1] or 2)) & (at >= at[:, None] - window[0]) & there
        wanted = attnlab.attend(x, x, x, mask=near).out[:, :, pad:]
        got = variant(x, x, x, window=window, key_mask=there, need_lse=True).out[:, :, pad:]
        torch.testing.assert_close(got, wanted, **CLOSE)
        got = variant(x, x, x, window=window, key_mask=there).out[:, :, pad:]
        torch.testing.assert_close(got, wanted, **CLOSE)


class Placed(attnlab.FeatureMapAttention):
    """Features that depend on how far a token stands from the beginning."""

    name = "placed"
    formula = "placed"
    capabilities = replace(FEATURE_MAP_CAPABILITIES, position_free=False)

    def feature_map(self, x: Tensor, *, role: Any, positions: Tensor) -> Tensor:
        place = positions if positions.dim() == 1 else positions[:, None]
        return torch.exp(0.3 * x) * (1 + 0.1 * place.to(x.dtype).sin()[..., None])


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [16, 1, 1, 10, 12]])
def test_sums_of_features_remember_where_each_row_began(sizes: list[int]) -> None:
    variant, inputs = Placed(num_heads=2, head_dim=4), rows(40)
    state, at, outs = variant.init_state(len(PADS), dtype=torch.float64), 0, []
    for number, size in enumerate(sizes):
        piece = slice(at, at + size)
        if number == 1:
            state = state.reorder(torch.arange(len(PADS)))
        answer = variant(*(x[:, :, piece] for x in inputs), causal=True, state=state, key_mask=present(40)[:, piece])
        state, at = answer.state, at + size
        outs.append(answer.out)
    for b, pad in enumerate(PADS):
        wanted = alone(variant, inputs, b).out
        torch.testing.assert_close(torch.cat(outs, 2)[b : b + 1, :, pad:], wanted, **CLOSE)


def test_positions_of_a_call_and_those_of_its_formula() -> None:
    there = torch.tensor([[False, False, True, False, True], [True] * 5, [False] * 5])
    seen = Visibility.resolve(
        AttentionMask(key_mask=there), batch=3, num_heads=1, query_length=5, key_length=5,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert seen.key_positions.tolist() == [0, 1, 2, 3, 4]
    assert seen.unpadded_key_positions.tolist() == [[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-5, -4, -3, -2, -1]]
    assert torch.equal(seen.unpadded_query_positions, seen.unpadded_key_positions)


@pytest.mark.parametrize(
    ("options", "invariant"),
    [
        (("sliding_window", {}), True),
        (("sliding_window", {"sink_tokens": 2}), False),
        (("multiplicative", {"score": "location", "local": "m"}), False),
        (("multiplicative", {"local": "m"}), True),
        (("linearised", {"feature_map": "cosformer"}), True),
    ],
)
def test_shift_invariance_is_a_fact_of_the_instance(options: tuple[str, dict[str, Any]], invariant: bool) -> None:
    """F03"""
    name, chosen = options
    assert create(name, num_heads=1, head_dim=4, **chosen).shift_invariant is invariant


def test_check_options_are_validated_when_a_class_is_read() -> None:
    with pytest.raises(attnlab.PluginError, match="check_options must be a tuple of mappings"):

        class Wrong(attnlab.ScoreAttention):
            check_options = ({},)
