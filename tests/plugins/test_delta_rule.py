"""The delta rule against a plain loop, by what it must remember, and by what it must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, UnsupportedRequest, create

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, a few dozen products of numbers of order 1
B, H, HKV, D = 2, 4, 2, 4


def by_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, present: Tensor, causal: bool) -> Tensor:
    """`S += beta k (v - S^T k)^T`, read by `Dk^-0.5 q^T S` after the token at the query's position, or the last."""
    out = torch.zeros(B, H, q.shape[2], v.shape[3], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            g, memory, steps = h // 2, torch.zeros(k.shape[3], v.shape[3], dtype=q.dtype), []
            for t in range(k.shape[2]):
                if present[b, t]:
                    error = v[b, g, t] - memory.T @ k[b, g, t]
                    memory = memory + beta[b, g, t] * torch.outer(k[b, g, t], error)
                steps.append(memory)
            for i in range(q.shape[2]):
                out[b, h, i] = k.shape[3] ** -0.5 * q[b, h, i] @ (steps[i] if causal else memory)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_it_is_the_formula_of_the_paper(make: Any, causal: bool, padded: bool) -> None:
    q, k, v, beta = make(B, H, 6, D), make(B, HKV, 6, D), make(B, HKV, 6, 3), torch.rand(B, HKV, 6).double()
    present = torch.rand(B, 6) < 0.6 if padded else torch.ones(B, 6, dtype=torch.bool)
    for t in (k, v, beta):
        t[(~present)[:, None].expand(B, HKV, 6)] = torch.nan
    variant = create("delta_rule", num_heads=H, num_kv_heads=HKV, head_dim=D, value_dim=3)
    got = variant(q, k, v, causal=causal, gates={"beta": beta}, key_mask=present).out
    torch.testing.assert_close(got, by_loop(q, k, v, beta, present, causal), **CLOSE)


def test_a_key_written_again_replaces_what_it_held() -> None:
    variant = create("delta_rule", num_heads=1, head_dim=2)
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).reshape(1, 1, 3, 2)
    value = torch.tensor([[5.0, 6.0], [7.0, 8.0], [1.0, 2.0]]).reshape(1, 1, 3, 2)
    out = variant(key, key, value, causal=True, scale=1.0, gates={"beta": torch.ones(1, 1, 3)}).out
    assert torch.equal(out, value)  # a plain sum would give [6, 8] at the end


def test_a_strength_of_zero_writes_nothing() -> None:
    variant = create("delta_rule", num_heads=1, head_dim=2)
    x = torch.randn(1, 1, 3, 2)
    assert not variant(x, x, x, causal=True, gates={"beta": torch.zeros(1, 1, 3)}).out.any()


def test_its_gradients_match_finite_differences_over_more_tokens_than_a_segment(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlab.engines import scan

    monkeypatch.setattr(scan, "SEGMENT", 2)
    variant = create("delta_rule", num_heads=2, num_kv_heads=1, head_dim=2)
    q, k, v = (make(1, h, 5, 2).requires_grad_() for h in (2, 1, 1))
    beta = torch.rand(1, 1, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, v, beta: variant(q, k, v, causal=True, gates={"beta": beta}).out,
        (q, k, v, beta),
        fast_mode=True,
    )


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        (None, r"gates must be a mapping with beta: \[B,Hkv,Lk\] in \(0,1\), got NoneType"),
        ({}, "gates must be exactly beta, got none"),
        ({"gamma": torch.ones(1, 1, 3)}, "gates must be exactly beta, got gamma"),
        ({"beta": torch.ones(1, 3)}, r"gate beta must be \[B,Hkv,Lk\] = \[1, 1, 3\], got \[1, 3\]"),
        ({"beta": torch.ones(1, 1, 3, 2)}, r"got \[1, 1, 3, 2\]"),
        ({"beta": torch.ones(1, 1, 3).long()}, "gate beta must be a floating-point tensor, got int64"),
        ({"beta": 0.5}, "gate beta must be a floating-point tensor, got float"),
        (torch.ones(1, 1, 3), "gates must be a mapping of name to tensor, got a tensor of shape"),
    ],
)
def test_gates_that_do_not_fit_are_refused(gates: Any, words: str) -> None:
    x = torch.randn(1, 1, 3, 2)
    with pytest.raises(InvalidInput, match=words):
        create("delta_rule", num_heads=1, head_dim=2)(x, x, x, causal=True, gates=gates)


@pytest.mark.parametrize("asked", ["need_weights", "need_lse"])
def test_it_has_no_weights(asked: str) -> None:
    x, beta = torch.randn(1, 1, 3, 2), torch.ones(1, 1, 3)
    with pytest.raises(UnsupportedRequest, match=asked):
        create("delta_rule", num_heads=1, head_dim=2)(x, x, x, gates={"beta": beta}, **{asked: True})
