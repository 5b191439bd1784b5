"""The softmax of whole rows times values: answers and gradients of the formula, under every layout, transform and wish."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import ScoreAttention
from attnlab.conformance.checks._watching import DispatchMode
from attnlab.engines.softmax_values import softmax_values


def inputs() -> list[Tensor]:
    made = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    return [x.requires_grad_() for x in made]


def as_written(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(scores, -1)
    return weights @ value, weights


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("asked", ["out", "weights", "both"])
def test_answers_and_gradients_are_those_of_the_formula(asked: str, turned: bool) -> None:
    leaves = inputs()
    found: list[Tensor] = []
    for run in (softmax_values, as_written):
        scores = (leaves[0].transpose(-1, -2) * 2.0).contiguous().transpose(-1, -2) if turned else leaves[0]
        out, weights = run(scores, leaves[1])
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
    assert torch.autograd.gradgradcheck(lambda *x: softmax_values(*x)[part], inputs())


def test_batches_of_gradients_are_gradients() -> None:
    assert torch.autograd.gradcheck(lambda *x: softmax_values(*x)[0], inputs(), check_batched_grad=True)


def test_a_graph_that_is_kept_gives_its_gradients_again() -> None:
    leaves = inputs()
    loss = softmax_values(*leaves)[0].square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(mine, again)


def test_a_gradient_that_is_the_callers_is_not_written_to() -> None:
    leaves = inputs()
    weights = softmax_values(*leaves)[1]
    given = torch.randn_like(weights)
    before = given.clone()
    torch.autograd.grad(weights, leaves[0], given)
    assert torch.equal(given, before)


@pytest.mark.parametrize(("which", "products"), [(0, 2), (1, 2)], ids=["scores", "values"])
def test_only_what_is_asked_for_is_computed(which: int, products: int) -> None:
    class Products(DispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.bmm.default
            return func(*args, **(kwargs or {}))

    leaves = [x.detach().requires_grad_(n == which) for n, x in enumerate(inputs())]
    with Products() as mode:
        softmax_values(*leaves)[0].sum().backward()
    assert mode.count == products  # one forward, one backward


class Turned(ScoreAttention):
    """Scores that lie column by column."""

    name = "turned"

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return (key @ query.transpose(-1, -2)).transpose(-1, -2)


class Bounded(ScoreAttention):
    """A score whose graph keeps what it returns."""

    name = "bounded"

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return torch.tanh(query @ key.transpose(-1, -2))


@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize("kind", [Turned, Bounded])
def test_a_score_of_any_layout_and_graph_is_served(kind: Any, scale: float) -> None:
    variant = kind(num_heads=2, head_dim=4).double()
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]
    scores = variant.scores(*leaves[:2]) * scale
    torch.testing.assert_close(variant(*leaves, scale=scale).out, torch.softmax(scores, -1) @ leaves[2])
    assert torch.autograd.gradcheck(lambda q, k, v: variant(q, k, v, scale=scale).out, leaves)


def test_tracers_see_torchs_own_functions() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    made = attnlab.create("dot_product", num_heads=2, head_dim=4)
    given = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    run = lambda q, k, v: made(q, k, v, softcap=2.0).out  # noqa: E731
    torch.testing.assert_close(make_fx(run)(*given)(*given), run(*given))
    whole = torch.autograd.functional.jacobian(run, tuple(given))
    for mine, wanted in zip(torch.autograd.functional.jacobian(run, tuple(given), vectorize=True), whole, strict=True):
        torch.testing.assert_close(mine, wanted)
