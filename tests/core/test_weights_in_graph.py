"""F08: weights declared `in_graph` are what the output is computed from, whatever else is asked: its gradient reaches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab.catalogue import default_registry
from attnlab.engines import expand_heads


def _declares(name: str) -> bool:
    row = default_registry().info(name)
    if row.unavailable is not None or "weights" not in (row.capabilities or ()):
        return False
    return bool(attnlab.create(name, num_heads=2, head_dim=8).capabilities.weights == "in_graph")


NAMES = [name for name in default_registry().names() if _declares(name)]
L = 7


def _requests() -> dict[str, dict[str, Any]]:
    hidden = torch.rand(2, 1, L, L) < 0.5
    hidden[:, :, 2] = False
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (2, 1)},
        "mask": {"mask": hidden},
        "nothing visible": {"mask": torch.zeros(L, L, dtype=torch.bool)},
        "key_lengths": {"key_lengths": torch.tensor([3, L])},
        "query_lengths": {"query_lengths": torch.tensor([3, L])},
        "no keys": {"key_lengths": torch.tensor([0, 0])},
        "segments": {"segments": (torch.tensor([[0, 0, 0, 1, 1, -1, -1]] * 2),) * 2},
        "mask_mod": {"mask_mod": lambda b, h, q, k: (q + k) % 2 == 0},
        "score_mod": {"score_mod": lambda s, b, h, q, k: s - 0.1 * (q - k).abs()},
        "bias": {"bias": torch.randn(1, 2, L, L)},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(2)},
        "lse": {"need_lse": True},
        "scale 0": {"scale": 0.0},
    }


def _gradients(variant: Any, inputs: tuple[Tensor, ...], **request: Any) -> tuple[Tensor, Tensor]:
    """That of the returned weights, and what it must be where nothing is dropped: that of the output times values."""
    result = variant(*inputs, need_weights=True, **request)
    assert result.weights.requires_grad
    result.weights.retain_grad()
    by = torch.randn_like(result.out)
    result.out.backward(by)
    assert result.weights.grad is not None, "the output is not computed from the weights"
    assert result.weights.grad.dtype == result.weights.dtype
    return result.weights.grad, by @ expand_heads(inputs[2], by.shape[1]).mT


def _inputs(dtype: torch.dtype = torch.float64, length: int = L, heads: int = 2) -> tuple[Tensor, ...]:
    return (
        torch.randn(2, 2, length, 8, dtype=dtype, requires_grad=True),
        *(torch.randn(2, heads, L, 8, dtype=dtype, requires_grad=True) for _ in range(2)),
    )


@pytest.mark.parametrize("request_name", list(_requests()))
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_the_output_reaches_the_weights(name: str, request_name: str) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=8).double()
    request = _requests()[request_name]
    got, want = _gradients(variant, _inputs(), **request)
    present = torch.ones(2, 1, L, 1, dtype=torch.bool)
    if "query_lengths" in request:
        present = (torch.arange(L) < request["query_lengths"][:, None])[:, None, :, None]
    if "segments" in request:
        present = (request["segments"][0] >= 0)[:, None, :, None]
    keys = torch.ones(2, 1, 1, L, dtype=torch.bool)
    if "key_lengths" in request:
        keys = (torch.arange(L) < request["key_lengths"][:, None])[:, None, None]
    if "segments" in request:
        keys = (request["segments"][1] >= 0)[:, None, None]
    torch.testing.assert_close(got, want * present * keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_in_every_dtype_with_the_output_of_a_call_without_weights(name: str, dtype: torch.dtype) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=8).to(dtype)
    inputs = _inputs(dtype)
    got, want = _gradients(variant, inputs, query_lengths=torch.tensor([L, 4]), causal=True)
    here = (torch.arange(L) < torch.tensor([L, 4])[:, None])[:, None, :, None]
    # Sums of 8 products of numbers near 1, rounded once or twice.
    torch.testing.assert_close(got, want * here, rtol=0, atol=64 * torch.finfo(dtype).eps)
    both = [variant(*inputs, causal=True, need_weights=asked).out.detach() for asked in (True, False)]
    torch.testing.assert_close(*both, rtol=0, atol=8 * torch.finfo(dtype).eps * float(both[0].abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_grouped_heads_one_query_and_tiled_lengths(name: str) -> None:
    sizes = {"num_heads": 2, "head_dim": 8}
    _gradients(attnlab.create(name, **sizes).double(), _inputs(), dropout_p=0.5)
    grouped = attnlab.create(name, **sizes, num_kv_heads=1).double()
    got, want = _gradients(grouped, _inputs(heads=1))
    torch.testing.assert_close(got, want)
    if grouped.capabilities.cross_lengths:
        got, want = _gradients(attnlab.create(name, **sizes).double(), _inputs(length=1))
        torch.testing.assert_close(got, want)
    if name != "multiplicative_location":  # longer than its table
        x = tuple(torch.randn(1, 2, 1100, 8, requires_grad=True) for _ in range(3))
        _gradients(attnlab.create(name, **sizes), x, causal=True)


@pytest.mark.parametrize("name", NAMES)
def test_without_queries_or_keys_the_weights_are_in_the_graph(name: str) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=8).double()
    for batch, length in ((0, L), (2, 0)):
        x = tuple(torch.randn(batch, 2, length, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        _gradients(variant, x)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "multiplicative_location"])
@pytest.mark.parametrize("left", [None, 2])
def test_weights_over_past_and_new_keys_are_in_the_graph(name: str, left: int | None) -> None:
    options = {"left": left} if left is not None and name == "sliding_window" else {}
    variant = attnlab.create(name, num_heads=2, head_dim=8, **options).double()
    state = variant.init_state(2, dtype=torch.float64)
    for step in range(3):  # a window of 2 forgets before the last
        result = variant(*_inputs(), causal=True, state=state, need_weights=True)
        result.weights.retain_grad()
        result.out.sum().backward(retain_graph=True)
        assert result.weights.grad is not None
        assert result.weights.shape == (2, 2, L, L * (step + 1))
        state = result.state


def test_precomputed_keys_and_a_module_return_such_weights() -> None:
    x = _inputs(torch.float32)
    keys = attnlab.create("additive", num_heads=2, head_dim=8).precompute(x[1])
    for result in (
        keys(x[0], x[2], need_weights=True),
        attnlab.MultiHeadAttention(16, 2)(torch.randn(2, L, 16), need_weights=True),
    ):
        result.weights.retain_grad()
        result.out.sum().backward()
        assert result.weights.grad is not None
