"""Taylor, DPFP and cosine: the kernels that their features must make, by closed forms and by loops over indices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import attend, create, run_checks

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1


def kernel(name: str, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """`phi(q_i)^T phi(k_j)` of the features that the variant makes, `[B, H, Lq, Lk]`."""
    variant = create(name, num_heads=q.shape[1], head_dim=q.shape[3], **options)
    at = torch.arange(q.shape[2])
    phi_q, phi_k = (variant.feature_map(x, role=r, positions=at) for x, r in ((q, "query"), (k, "key")))
    assert phi_k.shape[3] == variant.num_features()
    return phi_q @ phi_k.mT


def test_taylor_is_the_second_order_polynomial_of_the_scaled_product(make: Any) -> None:
    q, k = make(2, 3, 5, 6), make(2, 3, 5, 6)
    s = q @ k.mT / math.sqrt(6)
    torch.testing.assert_close(kernel("linearised_taylor", q, k), 1 + s + s * s / 2, **CLOSE)


def test_taylor_is_close_to_softmax_where_scores_are_small(make: Any) -> None:
    q, k, v = 0.3 * make(1, 2, 9, 16), 0.3 * make(1, 2, 9, 16), make(1, 2, 9, 16)
    # |s| < .5: the third-order remainder is below .5^3 / 6 exp(.5) = .035 of the kernel; values are about 1.
    assert float((q @ k.mT / 4).abs().max()) < 0.5
    gap = (attend(q, k, v, "linearised_taylor").out - attend(q, k, v).out).abs().max()
    assert float(gap) < 2 * 0.035 * float(v.abs().max())


def dpfp_by_loops(x: list[float], nu: int) -> list[float]:
    """Schlag et al. 2021, eq. 37 and 38: `r_j r_(j - i)` with indices that wrap."""
    r = [max(y, 0.0) for y in x] + [max(-y, 0.0) for y in x]
    features = []
    for i in range(1, nu + 1):
        for j in range(len(r)):
            features.append(r[j] * r[(j - i) % len(r)])
    return features


@pytest.mark.parametrize("nu", [1, 2, 3, 7, 8, 9])
def test_dpfp_makes_the_products_of_the_paper(make: Any, nu: int) -> None:
    x = make(1, 1, 6, 4)
    variant = create("linearised_dpfp", num_heads=1, head_dim=4, nu=nu)
    got = variant.feature_map(x, role="key", positions=torch.arange(6))[0, 0]
    wanted = torch.tensor([dpfp_by_loops(row, nu) for row in x[0, 0].tolist()], dtype=torch.float64)
    assert torch.equal(got, wanted)
    assert variant.num_features() == 2 * 4 * nu


def test_dpfp_is_not_the_form_with_the_sign_outside_the_rectifier(make: Any) -> None:
    q, k, v = make(1, 1, 6, 4), make(1, 1, 6, 4), make(1, 1, 6, 4)

    def wrong(x: Tensor) -> Tensor:
        r = torch.cat([torch.relu(x), -torch.relu(x)], -1)
        return r * r.roll(1, -1)

    products = wrong(q) @ wrong(k).mT
    total = products.sum(-1, keepdim=True)
    out = products @ v / total.masked_fill(total == 0, 1)
    assert float((attend(q, k, v, "linearised_dpfp").out - out).abs().max()) > 0.1


def test_a_dpfp_query_that_meets_no_key_gives_zero_and_no_gradient() -> None:
    q = torch.tensor([[[[1.0, -1.0]]]], requires_grad=True)
    k = torch.tensor([[[[1.0, 1.0]]]])
    out = attend(q, k, torch.ones(1, 1, 1, 2), "linearised_dpfp").out
    assert not out.any()
    out.sum().backward()
    assert not q.grad.any()


def test_cosine_is_one_plus_the_cosine_and_zero_has_no_direction(make: Any) -> None:
    q, k = make(1, 2, 5, 6), make(1, 2, 5, 6)
    q[:, :, 0] = 0
    wanted = 1 + torch.nn.functional.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)
    wanted[:, :, 0] = 1
    torch.testing.assert_close(kernel("linearised_cosine", q, k), wanted, **CLOSE)


@pytest.mark.parametrize("size", [1e-2, 1e30])
def test_cosine_knows_directions_whose_squares_leave_the_range(size: float) -> None:
    x, v = torch.randn(1, 1, 4, 6), torch.randn(1, 1, 4, 6)
    # The factor is rounded once in each coordinate; four sums of a few terms.
    torch.testing.assert_close(
        attend(size * x, size * x, v, "linearised_cosine").out,
        attend(x, x, v, "linearised_cosine").out,
        atol=1e-5,
        rtol=1e-5,
    )


def test_cosine_of_opposite_vectors_alone_stays_finite_with_its_gradients() -> None:
    x, v = torch.randn(50, 2, 1, 7), torch.randn(50, 2, 1, 7)
    q, k = x.clone().requires_grad_(), (-x).requires_grad_()
    out = attend(q, k, v, "linearised_cosine").out
    out.sum().backward()
    assert all(t.isfinite().all() for t in (out, q.grad, k.grad))


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_slopes_near_a_small_normaliser_are_no_false_alarm(nu: int) -> None:
    """Few of a query's features may meet keys at all: quotients have third derivatives of 1e5 there."""
    variant = create("linearised", num_heads=2, head_dim=8, feature_map="dpfp", nu=nu)
    results = run_checks(variant, quick=True, only="gradients_match_finite_differences")
    assert results
    assert [r.message for r in results if not r.ok] == []
