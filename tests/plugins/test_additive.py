"""Additive attention against numpy's double loop, and the reports of FAULTS that concern it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch

from attnlab import InvalidInput, create, run_checks

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1


def by_loop(variant: Any, q: Any, k: Any, v: Any, visible: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`v^T tanh(W_q q + W_k k)` for every pair, from the parameters by name."""
    W_q, W_k, v_a = (variant.state_dict()[n].numpy() for n in ("W_q", "W_k", "v"))
    outs, weights = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            scores = numpy.array(
                [[v_a[h] @ numpy.tanh(W_q[h] @ x.numpy() + W_k[h] @ y.numpy()) for y in k[b, g]] for x in q[b, h]]
            )
            out, w = rows(scores, v[b, g].numpy(), visible[b])
            outs.append(torch.from_numpy(out)), weights.append(torch.from_numpy(w))
    shape = q.shape[:2]
    return torch.stack(outs).unflatten(0, shape), torch.stack(weights).unflatten(0, shape)


@pytest.mark.parametrize("lengths", [(3, 5), (1, 5), (4, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_it_is_the_formula_of_the_paper_for_widths_of_their_own(
    make: Any, rows: Any, lengths: tuple[int, int], kv_heads: int
) -> None:
    lq, lk = lengths
    variant = create(
        "additive", num_heads=2, num_kv_heads=kv_heads, head_dim=8, key_dim=12, value_dim=3, hidden_size=5
    ).double()
    q, k, v = make(2, 2, lq, 8), make(2, kv_heads, lk, 12), make(2, kv_heads, lk, 3)
    got = variant(q, k, v, need_weights=True)
    out, weights = by_loop(variant, q, k, v, numpy.ones((2, lq, lk), dtype=bool), rows)
    torch.testing.assert_close(got.out, out, **CLOSE)
    torch.testing.assert_close(got.weights, weights, **CLOSE)
    torch.testing.assert_close(variant(q, k, v).out, out, **CLOSE)


def test_lengths_hide_what_lies_beyond_them_and_a_length_of_zero_gives_zero(make: Any, rows: Any) -> None:
    variant = create("additive", num_heads=1, head_dim=4).double()
    q, k, v = make(3, 1, 2, 4), make(3, 1, 4, 4), make(3, 1, 4, 4)
    lengths = torch.tensor([4, 2, 0])
    visible = (torch.arange(4) < lengths[:, None])[:, None].expand(3, 2, 4)
    got = variant(q, k, v, key_lengths=lengths, need_weights=True)
    out, weights = by_loop(variant, q, k, v, visible.numpy(), rows)
    torch.testing.assert_close(got.out, out, **CLOSE)
    torch.testing.assert_close(got.weights, weights, **CLOSE)
    assert not got.weights[1, :, :, 2:].any()
    assert not got.out[2].any()


def test_more_padding_changes_nothing(make: Any) -> None:
    variant = create("additive", num_heads=2, head_dim=4).double()
    q, k, v = make(1, 2, 3, 4), make(1, 2, 9, 4), make(1, 2, 9, 4)
    padded = variant(q, k, v, key_lengths=torch.tensor([5])).out
    torch.testing.assert_close(padded, variant(q, k[:, :, :5], v[:, :, :5]).out, **CLOSE)


def test_a_row_of_a_batch_equals_that_row_alone(make: Any) -> None:
    variant = create("additive", num_heads=2, head_dim=4).double()
    q, k, v = make(3, 2, 4, 4), make(3, 2, 4, 4), make(3, 2, 4, 4)
    together = variant(q, k, v).out
    for b in range(3):
        torch.testing.assert_close(together[b], variant(q[b : b + 1], k[b : b + 1], v[b : b + 1]).out[0], **CLOSE)


def test_the_default_scale_is_one(make: Any) -> None:
    variant = create("additive", num_heads=1, head_dim=4).double()
    x = make(1, 1, 3, 4)
    assert torch.equal(variant(x, x, x).out, variant(x, x, x, scale=1.0).out)
    assert not torch.equal(variant(x, x, x).out, variant(x, x, x, scale=0.5).out)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "8"])
def test_a_hidden_size_that_cannot_be_is_refused(size: Any) -> None:
    with pytest.raises(InvalidInput, match="hidden_size must be an int of 1 or more"):
        create("additive", num_heads=1, head_dim=4, hidden_size=size)


@pytest.mark.parametrize("word", ["shared", "bias", "weight_norm"])
def test_a_switch_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(InvalidInput, match=f"{word} must be True or False, got 1"):
        create("additive", num_heads=1, head_dim=4, **{word: 1})


def test_shared_parameters_are_those_of_every_head(make: Any) -> None:
    shared = create("additive", num_heads=3, head_dim=4, shared=True).double()
    apart = create("additive", num_heads=3, head_dim=4).double()
    apart.load_state_dict({n: p.expand(3, *p.shape[1:]) for n, p in shared.state_dict().items()})
    q, k, v = make(1, 3, 4, 4), make(1, 3, 5, 4), make(1, 3, 5, 4)
    torch.testing.assert_close(shared(q, k, v).out, apart(q, k, v).out, **CLOSE)
    assert sum(p.numel() for p in shared.parameters()) * 3 == sum(p.numel() for p in apart.parameters())


def test_normed_and_biased_it_starts_as_the_plain_one(make: Any) -> None:
    plain = create("additive", num_heads=2, head_dim=4).double()
    normed = create("additive", num_heads=2, head_dim=4, bias=True, weight_norm=True).double()
    missing = normed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert sorted(missing) == ["b", "g"]
    with torch.no_grad():
        normed.g.copy_(normed.v.norm(dim=-1))
    q, k, v = make(1, 2, 4, 4), make(1, 2, 5, 4), make(1, 2, 5, 4)
    torch.testing.assert_close(normed(q, k, v).out, plain(q, k, v).out, **CLOSE)
    with torch.no_grad():  # the length of v has no part in it
        normed.v.mul_(7)
    torch.testing.assert_close(normed(q, k, v).out, plain(q, k, v).out, **CLOSE)


@pytest.mark.full
@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_every_combination_of_options_passes_its_checks(options: tuple[bool, ...]) -> None:
    switches = dict(zip(("shared", "bias", "weight_norm"), options, strict=True))
    results = run_checks(create("additive", num_heads=2, head_dim=8, hidden_size=6, **switches), quick=True)
    assert not [f"{r.check} [{r.case}]: {r.message}" for r in results if not r.ok]
