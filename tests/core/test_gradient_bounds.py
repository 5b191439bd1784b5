"""F02: gradients are bounded at zero, equal, tiny and huge tokens, of every variant with its options, through every module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab.catalogue import default_registry
from attnlab.engines import unit_length

NAMES = [n for n in default_registry().names() if default_registry().info(n).unavailable is None]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "additive": [{"weight_norm": True, "bias": True}, {"shared": True}],
    "gated": [{"decay": "head"}],
    "gated_delta": [{"decay": "channel"}],
    "linearised_dpfp": [{"nu": 3}],
    "multiplicative_local_p": [{"score": "concat"}],
    "sliding_window": [{"left": 2, "sink_tokens": 2}],
}
VARIANTS = [(name, options) for name in NAMES for options in ({}, *OPTIONS.get(name, []))]
IDS = ["-".join((name, *(f"{k}={v}" for k, v in options.items()))) for name, options in VARIANTS]
# The derivative of a vector of unit length is at most 1000, and others add a little; where the features of linearised
# shrink with their token, that of a normaliser of at least 1e-6 is, times the sum of 8 keys' features times values.
MOST, MOST_OF_SHRINKING = 1e4, 1e8
SHRINKING = ("linearised_relu", "linearised_squared_relu", "linearised_dpfp", "linearised_cosformer")


def _tokens(kind: str) -> Tensor:
    x = torch.randn(2, 8, 16)
    if kind == "all zero":
        x.zero_()
    elif kind == "equal":
        x[:] = x[:, :1].clone()
    elif kind != "usual":
        x[:, 3] *= float(kind)
    return x.requires_grad_()


def _largest(module: Any, x: Tensor, **arguments: Any) -> float:
    result = (
        module(x, **arguments)
        if isinstance(module, attnlab.MultiHeadAttention)
        else module(x, x, x, need_weights=False)
    )
    out = result[0]
    assert out.isfinite().all()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.isfinite().all()
    return float(gradient.abs().max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_small_and_equal_tokens_have_bounded_gradients(name: str, options: dict[str, Any], causal: bool) -> None:
    module = attnlab.MultiHeadAttention(16, 2, variant=name, **options)
    most = MOST_OF_SHRINKING if name in SHRINKING else MOST
    usual = _largest(module, _tokens("usual"), causal=causal)
    for kind in ("0", "all zero", "equal", "1e-3", "1e-8", "1e-20", "1e-30", "1e-40"):
        assert _largest(module, _tokens(kind), causal=causal) < most * usual, kind


# Sums of products of keys and values of 1e18, read by a query of 1e18, are no numbers of float32.
UNNORMALISED = ("fast_weights", "gated", "retention")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_huge_tokens_give_finite_outputs_and_gradients(name: str, options: dict[str, Any], causal: bool) -> None:
    module = attnlab.MultiHeadAttention(16, 2, variant=name, **options)
    kinds = ["1e4", "65504"]
    if name not in (*UNNORMALISED, "linearised_exp", "linearised_dpfp"):
        kinds += ["1e18"]
    for kind in kinds:
        _largest(module, _tokens(kind), causal=causal)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta"])
def test_the_drop_in_bounds_them_as_well(name: str) -> None:
    from attnlab.integrations.torch_mha import MultiheadAttention

    module = MultiheadAttention(16, 2, variant=name, batch_first=True)
    usual = _largest(module, _tokens("usual"))
    for kind in ("0", "all zero", "equal", "1e-20", "1e-40"):
        assert _largest(module, _tokens(kind)) < MOST * usual


@pytest.mark.parametrize("name", [n for n in NAMES if "linearised" in n])
@pytest.mark.parametrize("tiny", [0.0, 1e-8, 1e-20, 1e-40])
def test_attend_bounds_them_where_query_or_key_is_tiny(name: str, tiny: float) -> None:
    variant = attnlab.create(name, num_heads=2, head_dim=8)
    most = MOST_OF_SHRINKING if name in SHRINKING else MOST
    for small in range(3):
        x = [torch.randn(2, 2, 6, 8) for _ in range(3)]
        x[small][:, :, 2] *= tiny
        x = [t.requires_grad_() for t in x]
        for gradient in torch.autograd.grad(variant(*x, causal=True).out.sum(), x):
            assert gradient.isfinite().all()
            assert gradient.abs().max() < most


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unit_length_is_what_it_says(dtype: torch.dtype) -> None:
    x = torch.randn(64, 8, dtype=torch.float64)
    scales = torch.tensor([0, 1e-30, 1e-4, 1e-3, 1, 1e3], dtype=torch.float64).repeat(11)[:64, None]
    x = (x * scales).to(dtype)
    want = x.double() / x.double().norm(dim=-1, keepdim=True).clamp(min=1e-3)
    torch.testing.assert_close(
        unit_length(x).double(), want, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny
    )
    largest = torch.full((1, 8), torch.finfo(dtype).max, dtype=dtype)
    torch.testing.assert_close(unit_length(largest).double(), torch.full((1, 8), 8**-0.5).double(), rtol=1e-2, atol=0)


def test_unit_length_has_its_derivative() -> None:
    x = torch.randn(5, 8, dtype=torch.float64) * torch.tensor([1e-4, 1e-3, 1, 3, 1e3], dtype=torch.float64)[:, None]
    assert torch.autograd.gradcheck(unit_length, (x.requires_grad_(),), eps=1e-8, atol=1e-5, rtol=1e-4)
    zero = torch.zeros(8, requires_grad=True)
    unit_length(zero)[0].backward()
    assert zero.grad is not None
    assert float(zero.grad[0]) == pytest.approx(1e3)
