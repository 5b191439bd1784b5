"""Linearised attention against a plain loop, at the ends of its dtypes, and with padding on either side."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from attnlab import InvalidInput, UnsupportedRequest, attend, create, names

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1
MAPS: dict[str, Any] = {
    "elu": lambda x: numpy.where(x > 0, x + 1, numpy.exp(numpy.minimum(x, 0))),
    "relu": lambda x: numpy.maximum(x, 0),
    "squared_relu": lambda x: numpy.maximum(x, 0) ** 2,
    "exp": numpy.exp,
}
NAMES = {"elu": "linearised", "relu": "linearised_relu", "squared_relu": "linearised_squared_relu", "exp": "linearised_exp"}  # fmt: skip
ALL = [name for name in names() if name.startswith("linearised")]


def made(name: str, x: torch.Tensor, **options: Any) -> Any:
    """The variant `name` for tensors like x, in their dtype."""
    return create(name, num_heads=x.shape[1], head_dim=x.shape[3], **options).to(x.dtype)


def by_loop(q: Any, k: Any, v: Any, visible: Any, phi: Any) -> torch.Tensor:
    """`sum_j m_j phi(q)phi(k_j) v_j / sum_j m_j phi(q)phi(k_j)` for every query, where m says who is seen."""
    out = numpy.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in numpy.ndindex(*q.shape[:3]):
        g = h // (q.shape[1] // k.shape[1])
        kernel = numpy.array([phi(q[b, h, i].numpy()) @ phi(y.numpy()) for y in k[b, g]]) * visible[b, i]
        if kernel.sum():
            out[b, h, i] = kernel @ v[b, g].numpy() / kernel.sum()
    return torch.from_numpy(out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", sorted(MAPS))
def test_it_is_the_formula_of_the_paper(make: Any, kind: str, causal: bool) -> None:
    q, k, v = make(2, 4, 6, 8), make(2, 2, 6, 8), make(2, 2, 6, 3)
    visible = numpy.ones((2, 6, 6)) if not causal else numpy.broadcast_to(numpy.tril(numpy.ones((6, 6))), (2, 6, 6))
    got = attend(q, k, v, NAMES[kind], causal=causal, need_weights=True)
    wanted = by_loop(q, k, v, visible, MAPS[kind])
    torch.testing.assert_close(got.out, wanted, **CLOSE)
    torch.testing.assert_close(got.weights @ v.repeat_interleave(2, 1), wanted, **CLOSE)
    assert torch.equal(create("linearised", num_heads=4, num_kv_heads=2, head_dim=8, value_dim=3, feature_map=kind)(q, k, v, causal=causal).out, got.out)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
def test_padding_on_either_side_equals_trimming_and_gets_no_gradient(
    make: Any, name: str, side: str, causal: bool
) -> None:
    q, k, v = (make(1, 2, 11, 8) for _ in range(3))
    valid = slice(5, 11) if side == "left" else slice(0, 6)
    present = torch.zeros(1, 11, dtype=torch.bool)
    present[:, valid] = True
    for t in (k, v):
        t[:, :, ~present[0]] = torch.nan
    for t in (q, k, v):
        t.requires_grad_()
    variant = made(name, q)
    padded = variant(q, k, v, causal=causal, key_mask=present).out[:, :, valid]
    trimmed = variant(q[:, :, valid], k[:, :, valid], v[:, :, valid], causal=causal).out
    torch.testing.assert_close(padded, trimmed, **CLOSE)
    padded.sum().backward()
    for t in (k, v):
        assert not t.grad[:, :, ~present[0]].any()
        assert t.grad.isfinite().all()


def test_padded_memory_in_cross_attention_equals_trimmed(make: Any) -> None:
    q, k, v = make(2, 1, 3, 4), make(2, 1, 7, 4), make(2, 1, 7, 4)
    got = attend(q, k, v, "linearised", key_lengths=torch.tensor([4, 7])).out
    torch.testing.assert_close(got[0], attend(q[:1], k[:1, :, :4], v[:1, :, :4], "linearised").out[0], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_far_below_zero_do_not_vanish(dtype: torch.dtype) -> None:
    # elu(x) + 1 at x = -8 is exp(-8) = 3.4e-4, which bfloat16 loses beside 1; the mean of the values remains.
    x = torch.full((1, 1, 2, 4), -8.0).to(dtype)
    v = torch.tensor([1.0, 3.0]).to(dtype).reshape(1, 1, 2, 1)
    assert attend(x, x, v, "linearised").out.flatten().tolist() == [2.0, 2.0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_a_thousand_stay_finite_with_their_gradients(name: str, causal: bool, dtype: torch.dtype) -> None:
    q, k, v = ((1e3 * torch.randn(1, 2, 70, 8)).to(dtype).requires_grad_() for _ in range(3))
    out = made(name, q)(q, k, v, causal=causal).out
    assert out.isfinite().all()
    out.float().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


HOMOGENEOUS = ("linearised_relu", "linearised_squared_relu", "linearised_dpfp", "linearised_cosine", "linearised_cosformer")  # fmt: skip


@pytest.mark.parametrize("name", [n for n in HOMOGENEOUS if n in ALL])
def test_a_homogeneous_map_does_not_feel_a_common_factor_of_keys_and_queries(make: Any, name: str) -> None:
    q, k, v = make(1, 1, 5, 4), make(1, 1, 5, 4), make(1, 1, 5, 4)
    torch.testing.assert_close(attend(1024 * q, 1024 * k, v, name).out, attend(q, k, v, name).out, **CLOSE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_sums_pass_the_range_of_float16(name: str, causal: bool, autocast: bool) -> None:
    # Four features of 1 and more each; cosformer is made for that length.
    x = torch.ones(1, 1, 70000, 2, dtype=torch.float32 if autocast else torch.float16)
    variant = made(name, x, **({"max_length": 70000} if name.endswith("cosformer") else {}))
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast), torch.no_grad():
        out = variant(x, x, x, causal=causal).out
    assert out.dtype == torch.float16
    # Whole numbers are summed exactly; of others, two float32 sums of 70000 terms may differ by a rounding for each.
    exact = name in ("linearised", "linearised_relu", "linearised_squared_relu")
    limit = 0.0 if exact else 70000 * 2**-24 + 2**-11
    assert float((out.double() - 1).abs().max()) <= limit


def test_a_query_whose_kernel_is_zero_everywhere_gives_zero_and_no_nan() -> None:
    q = torch.full((1, 1, 1, 2), -1.0, requires_grad=True)
    out = attend(q, -q.detach(), q.detach(), "linearised_relu").out
    assert not out.any()
    out.sum().backward()
    assert not q.grad.any()


@pytest.mark.parametrize(
    "asked",
    [
        {"mask": torch.ones(3, 3, dtype=torch.bool)},
        {"window": (1, 1)},
        {"bias": torch.zeros(1, 1, 3, 3)},
        {"dropout_p": 0.1},
        {"scale": 0.5},
        {"softcap": 2.0},
    ],
    ids=lambda a: next(iter(a)),
)
def test_what_its_sums_cannot_express_is_refused(asked: dict[str, Any]) -> None:
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(UnsupportedRequest):
        attend(x, x, x, "linearised", **asked)


def test_an_unknown_map_is_refused_with_the_known() -> None:
    with pytest.raises(
        InvalidInput, match=r"feature_map must be one of elu, relu, squared_relu, exp, taylor, .*, got 'gelu'"
    ):
        create("linearised", num_heads=1, head_dim=4, feature_map="gelu")


WRONG = {
    "another map's": ("linearised", {"nu": 2}, "nu is an option of feature_map 'dpfp' alone, got nu=2 with 'elu'"),
    "too small": ("linearised_dpfp", {"nu": 0}, "nu must be an int of 1 or more, got 0"),
    "a flag": ("linearised_dpfp", {"nu": True}, "nu must be an int of 1 or more, got True"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_option_is_judged_with_its_map(case: str) -> None:
    name, options, told = WRONG[case]
    with pytest.raises(InvalidInput, match=told):
        create(name, num_heads=1, head_dim=4, **options)
