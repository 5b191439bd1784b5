"""Luong's four scores against numpy's double loop, and the traps of each: transposes, widths, lengths."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from attnlab import InvalidInput, UnsupportedRequest, create, run_checks

CLOSE = {"atol": 1e-12, "rtol": 1e-11}  # float64, sums of a few dozen terms of order 1
L = 5


def score_of(kind: str, variant: Any, h: int, q: Any, k: Any, j: int) -> float:
    """The score of one query and the key at position j, from the parameters by name."""
    parameters = {n: p.numpy() for n, p in variant.state_dict().items()}
    if kind == "dot":
        return float(q @ k)
    W_a = parameters["W_a"][h]
    if kind == "general":
        return float(q @ W_a @ k)
    if kind == "concat":
        return float(parameters["v_a"][h] @ numpy.tanh(W_a @ numpy.concatenate([q, k])))
    return float((W_a @ q)[j])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["dot", "general", "concat", "location"])
def test_each_score_is_the_formula_of_the_paper(make: Any, rows: Any, kind: str, causal: bool) -> None:
    key_dim = 4 if kind == "dot" else 6
    variant = create(
        "multiplicative", score=kind, num_heads=2, num_kv_heads=1, head_dim=4, key_dim=key_dim, value_dim=3,
        hidden_size=7, max_length=9,
    ).double()  # fmt: skip
    q, k, v = make(2, 2, L, 4), make(2, 1, L, key_dim), make(2, 1, L, 3)
    got = variant(q, k, v, causal=causal, need_weights=True)
    visible = numpy.tril(numpy.ones((L, L), dtype=bool)) if causal else numpy.ones((L, L), dtype=bool)
    for b in range(2):
        for h in range(2):
            x, y = q[b, h].numpy(), k[b, 0].numpy()
            scores = numpy.array([[score_of(kind, variant, h, x[i], y[j], j) for j in range(L)] for i in range(L)])
            out, weights = rows(scores, v[b, 0].numpy(), visible)
            torch.testing.assert_close(got.out[b, h], torch.from_numpy(out), **CLOSE)
            torch.testing.assert_close(got.weights[b, h], torch.from_numpy(weights), **CLOSE)


def test_a_transposed_matrix_gives_another_answer(make: Any) -> None:
    variant = create("multiplicative", num_heads=1, head_dim=4).double()
    q, k, v = make(1, 1, 3, 4), make(1, 1, 3, 4), make(1, 1, 3, 4)
    right = variant(q, k, v).out
    with torch.no_grad():
        variant.W_a.copy_(variant.W_a.transpose(-1, -2).clone())
    assert (variant(q, k, v).out - right).abs().max() > 1e-3
    torch.testing.assert_close(variant(k, q, v, need_weights=True).weights.shape, torch.Size([1, 1, 3, 3]))


def test_in_concat_the_query_comes_first(make: Any) -> None:
    variant = create("multiplicative_concat", num_heads=1, head_dim=2, key_dim=3).double()
    with torch.no_grad():
        variant.W_a[..., :2] = 0  # what is multiplied with the query
    k, v = make(1, 1, 4, 3), make(1, 1, 4, 3)
    one, other = variant(make(1, 1, 4, 2), k, v).out, variant(make(1, 1, 4, 2), k, v).out
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["dot", "general", "concat"])
def test_the_default_scale_is_one(make: Any, kind: str) -> None:
    variant = create("multiplicative", score=kind, num_heads=1, head_dim=4).double()
    x = make(1, 1, 3, 4)
    assert torch.equal(variant(x, x, x).out, variant(x, x, x, scale=1.0).out)


def test_dot_refuses_two_widths_and_names_both() -> None:
    with pytest.raises(UnsupportedRequest, match=r"d_q=8 beside key width d_k=12.*one width"):
        create("multiplicative_dot", num_heads=1, head_dim=8, key_dim=12)


def test_location_refuses_lengths_that_differ_and_states() -> None:
    variant = create("multiplicative_location", num_heads=1, head_dim=4)
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(UnsupportedRequest, match=r"3 queries and 5 keys \(allowed: one length\): location scores"):
        variant(x[:, :, :3], x, x)
    with pytest.raises(UnsupportedRequest, match="state="):
        variant(x, x, x, state=create("dot_product", num_heads=1, head_dim=4).init_state(1))


def test_location_refuses_more_keys_than_it_has_rows_for_even_after_fewer() -> None:
    variant = create("multiplicative_location", num_heads=1, head_dim=4, max_length=6)
    short, longer = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 7, 4)
    variant(short, short, short), variant(short, short, short)
    with pytest.raises(UnsupportedRequest, match=r"7 tokens \(allowed: up to 6\)"):
        variant(longer, longer, longer)


def test_location_counts_positions_from_the_first_present_key(make: Any) -> None:  # F04
    variant = create("multiplicative_location", num_heads=1, head_dim=4, max_length=8).double()
    x, present = make(1, 1, 4, 4), torch.tensor([[False, False, True, True]])
    weights = variant(x, x, x, key_mask=present, need_weights=True).weights[0, 0]
    logits = x[0, 0] @ variant.W_a[0].T
    torch.testing.assert_close(weights[:, 2:], torch.softmax(logits[:, :2], -1), **CLOSE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score": "generall"}, "score must be one of dot, general, concat, location, got 'generall'"),
        ({"max_length": 0}, "max_length must be an int of 1 or more, got 0"),
        ({"hidden_size": True}, "hidden_size must be an int of 1 or more, got True"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        create("multiplicative", num_heads=1, head_dim=4, **options)


def keys_read(variant: Any, lq: int, lk: int, **arguments: Any) -> torch.Tensor:
    """Which keys each query reads, `[Lq, Lk]`, by values that are unit vectors."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, lq, 4), torch.randn(1, 1, lk, 4)
    return variant(q, k, torch.eye(lk)[None, None], **arguments).out[0, 0] > 0


@pytest.mark.parametrize("kind", ["dot", "general", "concat"])
def test_local_m_reads_around_its_own_position_and_a_step_says_where_it_stands(kind: str) -> None:
    sizes = {"num_heads": 1, "head_dim": 4, "value_dim": 9, "score": kind}
    variant = create("multiplicative", local="m", half_width=2, **sizes)
    read = keys_read(variant, 6, 9)
    assert [row.nonzero().flatten().tolist() for row in read] == [
        [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [3, 4, 5, 6, 7],
    ]  # fmt: skip
    assert keys_read(variant, 1, 9, offset=4)[0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", ["dot", "general", "concat"])
@pytest.mark.parametrize(("towards", "place"), [(-50.0, 0.0), (0.0, 0.5), (50.0, 1.0)])
def test_local_p_reads_around_a_share_of_the_source_without_its_padding(
    kind: str, towards: float, place: float
) -> None:
    sizes = {"num_heads": 1, "head_dim": 4, "value_dim": 40, "score": kind}
    variant = create("multiplicative", local="p", half_width=3, **sizes)
    with torch.no_grad():  # tanh of W_p q is 1 or -1, so that the share is sigmoid(towards) or its mirror, alike at 0
        variant.W_p.zero_()
        variant.W_p += 1e-9
        variant.v_p.fill_(towards)
    q = torch.full((2, 1, 3, 4), 1e12)
    k, v = torch.zeros(2, 1, 40, 4), torch.eye(40).expand(2, 1, 40, 40)
    out = variant(q, k, v, key_mask=(torch.arange(40) >= 10) & (torch.arange(40) < torch.tensor([[40], [20]]))).out
    for b, (first, length) in enumerate([(10, 30), (10, 10)]):
        centre = first + length * place
        inside = [j for j in range(first, first + length) if abs(j - centre) <= 3]
        assert out[b, 0, 1].nonzero().flatten().tolist() == inside
        wanted = torch.tensor([numpy.exp(-((j - centre) ** 2) / (2 * 1.5**2)) / len(inside) for j in inside])
        torch.testing.assert_close(out[b, 0, 1, inside], wanted.float(), atol=1e-6, rtol=1e-5)


def test_the_position_of_local_p_is_learned() -> None:
    variant = create("multiplicative", local="p", num_heads=2, head_dim=4, half_width=3)
    q, k, v = (torch.randn(1, 2, 12, 4) for _ in range(3))
    variant(q, k, v).out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in variant.parameters())


@pytest.mark.parametrize("local", ["global", "", 1, "local-m"])
def test_a_locality_that_is_none_is_refused(local: Any) -> None:
    with pytest.raises(InvalidInput, match="local must be one of None, m, p, got"):
        create("multiplicative", num_heads=1, head_dim=4, local=local)


@pytest.mark.full
@pytest.mark.parametrize("local", ["m", "p"])
@pytest.mark.parametrize("kind", ["dot", "general", "concat", "location"])
def test_every_combination_of_score_and_locality_passes_its_checks(kind: str, local: str) -> None:
    made = create("multiplicative", num_heads=2, head_dim=8, score=kind, local=local, half_width=2)
    bad = [f"{r.check} [{r.case}]: {r.message}" for r in run_checks(made, quick=True) if not r.ok]
    assert not bad


def test_a_score_without_parameters_is_not_taken_for_what_its_name_makes() -> None:
    """`attend()` by the name makes `general`, which has parameters: that call says nothing of this instance."""
    made = create("multiplicative", num_heads=2, head_dim=8, score="dot", local="m", half_width=2)
    results = run_checks(made, quick=True, only="every_entry_point_refuses_undeclared_features")
    assert results
    assert [r.message for r in results if not r.ok] == []
