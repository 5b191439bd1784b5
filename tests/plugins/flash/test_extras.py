"""lse and its gradient, sinks, dropout, determinism, and the scale's sign, by the kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import UnsupportedRequest
from attnlab.conformance.compare.tolerances import UNIT, gamma
from attnlab.formulas import softmax_dot_product


def tensors(*lengths: int, width: int = 16, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, heads, n, width, generator=generator).to(dtype).requires_grad_() for n in lengths]


def test_the_gradient_through_lse_is_the_definitions(make: Any) -> None:
    q, k, v = tensors(19, 19, 19)
    sinks = torch.tensor([0.3, -1.0], requires_grad=True)
    visible = torch.ones(19, 19, dtype=torch.bool).tril().expand(1, 2, 19, 19)
    directions = torch.randn(1, 2, 19, 16), torch.randn(1, 2, 19)
    made = make(num_heads=2, head_dim=16)(q, k, v, causal=True, sinks=sinks, need_lse=True)
    found = torch.autograd.grad((made.out, made.lse), (q, k, v, sinks), directions)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    exact = softmax_dot_product(*wide[:3], visible=visible, parameters={}, options={}, scale=None, sinks=wide[3])
    wanted = torch.autograd.grad((exact["out"], exact["lse"]), wide, tuple(d.double() for d in directions))
    # Sums over at most 19 keys, 19 queries and 16 widths, forward and back, of terms up to the largest gradient.
    limit = gamma(4 * (19 + 19 + 16), UNIT["float32"]) * 10
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), right, atol=limit, rtol=limit)


def test_the_gradient_of_lse_alone_needs_no_out(make: Any) -> None:
    q, k, v = tensors(5, 5, 5)
    lse = make(num_heads=2, head_dim=16)(q, k, v, need_lse=True).lse
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = q.detach().requires_grad_() @ k.detach().transpose(-1, -2) * 0.25
    # d lse / d score is the weight, so the gradient of q is the mean of keys, scaled.
    torch.testing.assert_close(found[0], scores.detach().softmax(-1) @ k.detach() * 0.25)
    assert not found[2].any()


def test_two_backwards_have_the_same_bits(make: Any) -> None:
    q, k, v = tensors(70, 70, 70)
    bias = torch.randn(1, 2, 1, 70, requires_grad=True)
    flash = make(num_heads=2, head_dim=16)
    answers = []
    for _ in range(2):
        out = flash(q, k, v, causal=True, bias=bias).out
        answers.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_the_same_seed_draws_the_same_mask_whatever_the_tiles(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.engines import Configuration
    from attnlab_plugins.flash import launch

    q, k, _ = tensors(40, 40, 40)
    v = torch.eye(40).expand(1, 2, 40, 40)  # out is the weights
    flash = make(num_heads=2, head_dim=16, value_dim=40)
    outs = []
    for tiles in (Configuration(16, 16, 4, 1), Configuration(32, 64, 4, 1), Configuration(64, 32, 4, 1)):
        monkeypatch.setattr(launch, "interpreted", lambda length, tiles=tiles: tiles)
        torch.manual_seed(3)
        outs.append(flash(q, k, v, dropout_p=0.4).out)
    assert torch.equal(outs[0] != 0, outs[1] != 0)
    assert torch.equal(outs[0] != 0, outs[2] != 0)
    torch.manual_seed(4)
    assert not torch.equal(flash(q, k, v, dropout_p=0.4).out != 0, outs[0] != 0)


def test_a_pairs_draw_depends_on_its_place_alone_and_is_fair(interpreter: None) -> None:
    where = Path(__file__).with_name("span_kernels.py")
    spec = importlib.util.spec_from_file_location("kept_under_test", where)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    draws = []
    for rows, columns in ((64, 64), (32, 128)):
        out = torch.zeros(128, 256, dtype=torch.int8)
        kernels.kept_kernel[(128 // rows, 256 // columns)](out, 77, 5, 0.3, rows, columns)
        draws.append(out)
    assert torch.equal(*draws)
    share = draws[0].float().mean()
    # 32,768 draws of probability 0.7: six standard deviations are 0.0152.
    assert abs(share - 0.7) < 0.0152
    neighbours = (draws[0][:, 1:] == draws[0][:, :-1]).float().mean()
    assert abs(neighbours - 0.58) < 0.017  # 0.7^2 + 0.3^2, the same six deviations


def test_all_weights_may_be_dropped(make: Any) -> None:
    q, k, v = tensors(5, 5, 5)
    out = make(num_heads=2, head_dim=16)(q, k, v, dropout_p=1.0).out
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), (v,))[0].any()


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 1e-20])
def test_no_scale_turns_hidden_pairs_into_visible_ones(make: Any, scale: float) -> None:
    q, k, v = tensors(19, 19, 19)
    out = make(num_heads=2, head_dim=16)(q, k, v, causal=True, scale=scale).out
    scores = (q * scale) @ k.transpose(-1, -2)
    hidden = torch.ones(19, 19, dtype=torch.bool).triu(1)
    torch.testing.assert_close(out, scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    for got in torch.autograd.grad(out.sum(), (q, k)):
        assert got.isfinite().all()
        assert scale or not got.any()


def test_huge_scores_leave_gradients_finite(make: Any) -> None:
    q, k, v = (x * 1e4 for x in tensors(19, 19, 19))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = make(num_heads=2, head_dim=16)(*leaves, causal=True).out
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_a_finite_bias_of_float64_hides_nothing(make: Any) -> None:
    q, k, v = tensors(3, 3, 3)
    bias = torch.full((1, 1, 3, 3), torch.finfo(torch.float64).min, dtype=torch.float64, requires_grad=True)
    out = make(num_heads=2, head_dim=16)(q, k, v, bias=bias).out
    assert out.isfinite().all()
    assert out.any()
    assert torch.autograd.grad(out.sum(), bias)[0].dtype == torch.float64


def test_a_gradient_of_a_gradient_is_refused_where_it_is_asked_for(make: Any) -> None:
    q, k, v = tensors(5, 5, 5)
    out = make(num_heads=2, head_dim=16)(q, k, v).out
    (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedRequest, match="no gradients of gradients; dot_product serves"):
        (found.sum() + q.sum()).backward()


def test_an_expanded_gradient_is_read_through_its_strides(make: Any) -> None:
    q, k, v = tensors(19, 19, 19)
    out = make(num_heads=2, head_dim=16)(q, k, v).out
    expanded = torch.ones(()).expand_as(out)
    a = torch.autograd.grad(out, (q, k, v), expanded, retain_graph=True)
    b = torch.autograd.grad(out, (q, k, v), expanded.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_tail_of_a_length_of_137_is_as_exact_as_the_rest(make: Any) -> None:
    q, k, v = tensors(137, 137, 137, heads=1)
    out = make(num_heads=1, head_dim=16)(q, k, v).out
    exact = (q.double() @ k.double().transpose(-1, -2) * 0.25).softmax(-1) @ v.double()
    worst = (out - exact).abs().amax((0, 1, 3))  # by row
    assert worst[128:].max() <= 3 * worst.median()  # of 137 maxima over 16 roundings each
