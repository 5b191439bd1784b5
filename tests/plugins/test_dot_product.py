"""Scaled dot-product attention against numpy, and the reports of FAULTS that concern it."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, UnsupportedRequest, attend, create

# float64 against numpy's float64: a few dozen roundings of numbers of order 1.
CLOSE = {"atol": 1e-12, "rtol": 1e-11}
VARIANTS = ("dot_product", "flash")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("widths", [(8, 8), (5, 7), (16, 8)], ids=str)
def test_it_is_the_formula_of_the_paper(make: Any, rows: Any, name: str, widths: tuple[int, int]) -> None:
    if name == "flash" and widths[0] != widths[1]:
        with pytest.raises(UnsupportedRequest, match=f"d_v={widths[1]} beside key width d_k={widths[0]}"):
            create(name, num_heads=1, head_dim=widths[0], value_dim=widths[1])
        return
    q, k, v = make(2, 3, 5, widths[0]), make(2, 3, 6, widths[0]), make(2, 3, 6, widths[1])
    out = attend(q, k, v, name).out
    for b in range(2):
        for h in range(3):
            scores = q[b, h].numpy() @ k[b, h].numpy().T / numpy.sqrt(widths[0])
            wanted, _ = rows(scores, v[b, h].numpy(), numpy.ones((5, 6), dtype=bool))
            torch.testing.assert_close(out[b, h], torch.from_numpy(wanted), **CLOSE)


def test_two_keys_of_known_scores_share_as_computed_by_hand() -> None:
    # Scores 0 and ln 3 with scale 1: weights 1/4 and 3/4, so 1/4 * 4 + 3/4 * 8 = 7; lse = ln 4.
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 3.0], dtype=torch.float64).log().reshape(1, 1, 2, 1)
    v = torch.tensor([4.0, 8.0], dtype=torch.float64).reshape(1, 1, 2, 1)
    made = attend(q, k, v, scale=1.0, need_weights=True, need_lse=True)
    torch.testing.assert_close(made.out.flatten(), torch.tensor([7.0], dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(made.weights.flatten(), torch.tensor([0.25, 0.75], dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(made.lse.exp().flatten(), torch.tensor([4.0], dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_without_a_key_are_zero_and_every_gradient_is_finite(make: Any, name: str) -> None:
    q, k, v = (make(1, 1, 8, 8).requires_grad_() for _ in range(3))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    out = attend(q, k, v, name, mask=mask).out
    assert not out[..., 4:, :].any()
    out.square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert not q.grad[..., 4:, :].any()
    assert not k.grad[..., 4:, :].any()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_absent_keys_may_hold_anything(make: Any, name: str, poison: float, where: str) -> None:
    q, k, v = make(2, 2, 4, 4), make(2, 2, 6, 4), make(2, 2, 6, 4)
    present = torch.tensor([[True, True, False, True, True, False], [False, False, True, True, True, True]])
    wanted = attend(q, k, v, name, key_mask=present).out
    for tensor, chosen in ((k, "key"), (v, "value")):
        if where in (chosen, "both"):
            tensor[(~present)[:, None].expand(2, 2, 6)] = poison
    assert torch.equal(attend(q, k, v, name, key_mask=present).out, wanted)


@pytest.mark.parametrize("name", VARIANTS)
def test_both_alignments_of_causality_are_those_of_the_worked_matrix(make: Any, name: str) -> None:
    q, k = make(1, 1, 5, 4), make(1, 1, 2, 4)
    v = torch.eye(2, 4, dtype=torch.float64)[None, None]
    bottom = attend(q, k, v, name, causal=True, offset="bottom_right").out[0, 0, :, :2] > 0
    assert bottom.int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    top = attend(q, k, v, name, causal=True, offset="top_left").out[0, 0, :, :2] > 0
    assert top.int().tolist() == [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]]
    with pytest.raises(InvalidInput, match=r"5 queries and 2 keys.*'top_left'.*'bottom_right'"):
        attend(q, k, v, name, causal=True)


def test_a_hidden_key_has_no_weight_even_where_scores_differ_by_hundreds() -> None:
    q = torch.full((1, 1, 1, 1), 300.0)
    k = torch.tensor([0.0, 1.0]).reshape(1, 1, 2, 1)
    weights = attend(q, k, k, scale=1.0, mask=torch.tensor([[True, False]]), need_weights=True).weights
    assert weights.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_large_scores_with_a_dead_row_stay_finite_in_half_precision(name: str, dtype: torch.dtype) -> None:
    q = torch.full((1, 1, 3, 4), 120.0).to(dtype)
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    v = torch.randn(1, 1, 3, 4).to(dtype)
    out = attend(q, q, v, name, mask=mask, scale=1.0).out
    assert out.isfinite().all()
    assert not out[..., 1, :].any()


def test_causal_and_a_mask_combine(make: Any) -> None:
    q, k, v = make(1, 2, 5, 4), make(1, 2, 5, 4), make(1, 2, 5, 4)
    mask = torch.rand(5, 5) < 0.7
    both = attend(q, k, v, causal=True, mask=mask).out
    torch.testing.assert_close(both, attend(q, k, v, mask=mask.tril()).out, **CLOSE)


@pytest.mark.parametrize("name", VARIANTS)
def test_asking_for_more_changes_no_output(make: Any, name: str) -> None:
    q, k, v = make(1, 2, 5, 4), make(1, 2, 5, 4), make(1, 2, 5, 4)
    plain = attend(q, k, v, name, causal=True).out
    torch.testing.assert_close(attend(q, k, v, name, causal=True, scale=0.5).out, plain, **CLOSE)
    if name == "flash":
        for asked in ("need_weights", "need_lse"):
            with pytest.raises(UnsupportedRequest, match="dot_product"):
                attend(q, k, v, name, causal=True, **{asked: True})
        return
    more = attend(q, k, v, name, causal=True, need_weights=True, need_lse=True)
    torch.testing.assert_close(more.out, plain, **CLOSE)
    assert not more.weights.triu(1).any()


def test_a_key_of_the_second_group_reaches_only_its_query_heads(make: Any) -> None:
    q, k, v = make(1, 4, 3, 4), make(1, 2, 3, 4), make(1, 2, 3, 4)
    changed = k.clone()
    changed[:, 1, :, 0] += 100
    same = (attend(q, k, v).out == attend(q, changed, v).out).all(-1).all(-1)[0]
    assert same.tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_in_gives_nothing_or_zero_out_with_gradients(make: Any, name: str, empty: str) -> None:
    b, lq, lk = (0 if empty == word else n for word, n in (("batch", 2), ("queries", 3), ("keys", 4)))
    q, k, v = (make(b, 10, n, 8).requires_grad_() for n in (lq, lk, lk))
    out = attend(q, k, v, name).out
    assert out.shape == (b, 10, lq, 8)
    assert not out.any()
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert not q.grad.any()


@pytest.mark.parametrize("name", VARIANTS)
def test_strides_of_inputs_and_of_incoming_gradients_change_nothing(make: Any, name: str) -> None:
    packed = make(2, 7, 3, 2, 8)  # [B, L, 3, H, D], as one projection makes it
    views = [packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    whole = [t.detach().contiguous().requires_grad_() for t in views]
    upstream = make(2, 7, 2, 8).transpose(1, 2)
    outs = [attend(*x, name, causal=True).out for x in (views, whole)]
    torch.testing.assert_close(outs[0], outs[1], **CLOSE)
    got = torch.autograd.grad(outs[0], views, upstream)
    want = torch.autograd.grad(outs[1], whole, upstream.contiguous())
    summed = torch.autograd.grad(attend(*whole, name, causal=True).out.sum(), whole)
    ones = torch.autograd.grad(attend(*whole, name, causal=True).out, whole, torch.ones_like(outs[1]))
    for pairs in ((got, want), (summed, ones)):
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_zero_scale_gives_the_mean_and_one_key_its_value(make: Any) -> None:
    q, k, v = make(1, 1, 3, 4), make(1, 1, 5, 4), make(1, 1, 5, 4)
    mean = v.mean(2, keepdim=True).expand(1, 1, 3, 4)
    torch.testing.assert_close(attend(q, k, v, scale=0.0).out, mean, **CLOSE)
    only = attend(q, k, v, mask=torch.arange(5) == torch.tensor([[2], [4], [0]])).out
    torch.testing.assert_close(only[0, 0], v[0, 0, [2, 4, 0]], **CLOSE)


def test_negative_scale_under_a_mask_is_the_formula(make: Any) -> None:
    q, k, v = make(1, 1, 4, 4), make(1, 1, 4, 4), make(1, 1, 4, 4)
    got: Tensor = attend(q, k, v, scale=-0.5, causal=True).out
    torch.testing.assert_close(got, attend(-q, k, v, scale=0.5, causal=True).out, **CLOSE)


def test_dropout_keeps_the_mean_over_many_seeds(make: Any) -> None:
    q, k, v = (make(1, 1, 3, 2).expand(2000, 1, 3, 2) for _ in range(3))
    p = 0.3
    dropped, plain = attend(q, k, v, dropout_p=p).out, attend(q, k, v).out[0]
    error = dropped.std(0) / 2000**0.5
    assert ((dropped.mean(0) - plain).abs() < 4 * error).all()


def test_a_batch_of_many_short_sequences_is_right_to_its_last_row() -> None:
    x = torch.randn(20000, 1, 2, 4)
    out = attend(x, x, x, causal=True).out
    for row in (0, 9999, 19999):
        # One row alone, in float32: sums of 4 and 2 terms of order 1.
        torch.testing.assert_close(out[row], attend(*[x[row : row + 1]] * 3, causal=True).out[0], atol=4e-6, rtol=0)
