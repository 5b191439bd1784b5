"""The softmax of whole rows times values, whose memory is that of the scores: answers, gradients, and whose scores may be overwritten."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import ScoreAttention
from attnlab.engines.softmax_values import softmax_values


def inputs() -> list[Tensor]:
    made = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    return [x.requires_grad_() for x in made]


def as_written(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(scores, -1)
    return weights @ value, weights


def here(scores: Tensor, value: Tensor, owned: bool = True) -> tuple[Tensor, Tensor]:
    return softmax_values(scores * 1.0, value, owned=owned)  # a product, which no graph keeps


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("asked", ["out", "weights", "both"])
def test_answers_and_gradients_are_those_of_the_formula(owned: bool, asked: str) -> None:
    leaves = inputs()
    found: list[Tensor] = []
    for out, weights in (here(*leaves, owned=owned), as_written(*leaves)):
        loss = torch.zeros((), dtype=torch.float64)
        if asked != "weights":
            loss = loss + out.square().sum()
        if asked != "out":
            loss = loss + weights.pow(3).sum()
        found += [out, weights, *torch.autograd.grad(loss, leaves, materialize_grads=True)]
    for mine, wanted in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-14, rtol=1e-13)


@pytest.mark.parametrize("part", [0, 1])
def test_second_derivatives_are_those_of_the_formula(part: int) -> None:
    assert torch.autograd.gradgradcheck(lambda *x: here(*x)[part], inputs())


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    leaves = inputs()
    loss = here(*leaves)[0].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(mine, again)


def test_scores_are_overwritten_where_they_are_owned_alone() -> None:
    scores, value = inputs()
    other = scores * 1.0
    before = other.detach().clone()
    softmax_values(other, value, owned=False)
    softmax_values(other[:, :, :2], value, owned=True)  # a view: the rest is somebody's
    with torch.no_grad():
        softmax_values(other, value, owned=True)
    assert torch.equal(other, before)
    assert softmax_values(other, value, owned=True)[1].data_ptr() == other.data_ptr()


class Bounded(ScoreAttention):
    """A score whose graph keeps what it returns."""

    name = "bounded"

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.tanh(query @ key.transpose(-1, -2))


class BoundedAdditive(type(attnlab.create("additive", num_heads=1, head_dim=1))):  # type: ignore[misc]
    """The same beneath a class that owns its scores."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.tanh(super().scores(query, key, **positions))


@pytest.mark.parametrize("kind", [Bounded, BoundedAdditive])
def test_a_score_that_a_graph_keeps_is_left_alone(kind: Any) -> None:
    variant = kind(num_heads=2, head_dim=4).double()
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: variant(q, k, v, scale=1.0).out, leaves)


def test_a_class_that_wrongly_owns_its_scores_is_told_by_torch() -> None:
    class Wrong(Bounded):
        owns_scores = True

        def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
            return super().scores(query, key, **positions)

    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Wrong(num_heads=2, head_dim=4)(x, x, x, scale=1.0).out.sum().backward()
