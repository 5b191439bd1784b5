"""The additive score by blocks: tanh(q + k) without a tanh, whatever the range of q and k."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnlab.conformance.checks._watching import DispatchMode
from attnlab.engines import additive, additive_cpu, additive_scores
from attnlab.engines.additive import _by_blocks as by_blocks
from attnlab.engines.additive_cpu import BLOCK_ELEMENTS


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell says: these tests are of the CPU's engine, `test_additive_kernels` of the kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


SHAPES = [(1, 2, 5, 7, 3), (2, 2, 130, 90, 64), (1, 1, 1, 700, 16), (1, 2, 300, 1, 64), (1, 1, 40, 1500, 5)]


def drawn(shape: tuple[int, ...], spread: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    b, h, tq, tk, a = shape
    generator = torch.Generator().manual_seed(tq)
    sizes = ((b, h, tq, a), (b, h, tk, a), (h, a))
    return [
        (torch.randn(*s, generator=generator, dtype=torch.float64) * (spread if len(s) == 4 else 1)).to(dtype)
        for s in sizes
    ]


def written(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(query[:, :, :, None] + key[:, :, None]) * v[:, None, None]).sum(-1)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], spread: float) -> None:
    inputs = drawn(shape, spread)
    leaves = [x.clone().requires_grad_() for x in inputs]
    others = [x.clone().requires_grad_() for x in inputs]
    exact, got = written(*leaves), additive_scores(*others)
    direction = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(got, exact, rtol=1e-13, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(additive_scores(*inputs), got)
    for mine, theirs in zip(
        torch.autograd.grad(got, others, direction), torch.autograd.grad(exact, leaves, direction), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("v_asked", [True, False])
@pytest.mark.parametrize("spread", [1.0, 60.0], ids=["near", "far"])
@pytest.mark.parametrize("heads_of_tile", [1, 2, 3, 6])
def test_tiles_by_channel_give_scores_and_gradients_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, heads_of_tile: int, spread: float, v_asked: bool
) -> None:
    """As large tiles are worked on, with a last group of fewer heads, whose channels then go together."""
    tq, tk = 40, 50
    monkeypatch.setattr(additive_cpu, "BLOCK_ELEMENTS", heads_of_tile * tq * tk)
    inputs = drawn((1, 5, tq, tk, 7), spread)
    assert not additive_cpu._heads_together(*(x.flatten(0, 1) for x in inputs[:2]))
    leaves = [x.clone().requires_grad_() for x in inputs]
    others = [x.clone().requires_grad_() for x in inputs]
    exact, got = written(*leaves), additive_scores(*others)
    torch.testing.assert_close(got, exact, rtol=1e-13, atol=1e-12)
    direction = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    asked = 3 if v_asked else 2
    for mine, theirs in zip(
        torch.autograd.grad(got, others[:asked], direction),
        torch.autograd.grad(exact, leaves[:asked], direction),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [19.9, 20.1, 43.0, 50.0, 88.0, 100.0, 700.0, 1e6])
def test_sides_that_cancel_are_exact_however_far_they_are(far: float, dtype: torch.dtype) -> None:
    left = torch.tensor([far, -far, far], dtype=dtype).view(1, 1, 1, 3)
    right = torch.tensor([[-far, far, -far], [-far + 7, far - 3, 0.25 - far]], dtype=dtype).view(1, 1, 2, 3)
    v = torch.tensor([[1.0, 2.0, -0.5]], dtype=dtype)
    got = [x.clone().requires_grad_() for x in (left, right, v)]
    exact = [x.double().requires_grad_() for x in (left, right, v)]
    scores, wanted = additive_scores(*got), written(*exact)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(scores.double(), wanted, rtol=0, atol=40 * unit)
    for mine, theirs in zip(
        torch.autograd.grad(scores.sum(), got), torch.autograd.grad(wanted.sum(), exact), strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=40 * unit)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_where_the_formula_sends_it(bad: float) -> None:
    query, key, v = drawn((1, 1, 3, 4, 5))
    query[0, 0, 1, 2] = bad
    torch.testing.assert_close(additive_scores(query, key, v), written(query, key, v), equal_nan=True)
    query[0, 0, 1, 2], key[0, 0, 3, 2] = 0.5, bad
    torch.testing.assert_close(additive_scores(query, key, v), written(query, key, v), equal_nan=True)


def test_second_derivatives_are_those_of_the_formula() -> None:
    inputs = [x.requires_grad_() for x in drawn((1, 2, 3, 4, 5))]
    assert torch.autograd.gradgradcheck(additive_scores, inputs)


def test_second_derivatives_reach_only_what_asks_for_them() -> None:
    query, key, v = drawn((1, 2, 3, 4, 5))
    key.requires_grad_()
    [first] = torch.autograd.grad(additive_scores(query, key, v).sum(), key, create_graph=True)
    [second] = torch.autograd.grad(first.square().sum(), key)
    [wanted] = torch.autograd.grad(written(query, key, v).sum(), key, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(wanted.square().sum(), key)[0])


def test_listing_making_and_calling_on_the_cpu_import_no_triton() -> None:
    code = (
        "import sys, torch, attnlab, attnlab.engines\n"
        "attnlab.names(); attnlab.info('additive')\n"
        "x = torch.randn(1, 1, 3, 8, requires_grad=True)\n"
        "attnlab.create('additive', num_heads=1, head_dim=8)(x, x, x, causal=True).out.sum().backward()\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_cuda_is_served_by_kernels_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(NamedTuple):
        dtype: torch.dtype
        device: torch.device = torch.device("cuda")

    asked: list[str] = []
    monkeypatch.setattr(additive, "kernels_serve", lambda device: asked.append(device) or True)
    assert additive._by_kernels(Cuda(torch.bfloat16), Cuda(torch.float32))  # type: ignore[arg-type]
    assert not additive._by_kernels(Cuda(torch.float32), Cuda(torch.float64))  # type: ignore[arg-type]
    assert not additive._by_kernels(Cuda(torch.float32), torch.ones(1))  # type: ignore[arg-type]
    assert asked == ["cuda"]


def test_no_temporary_has_the_hidden_size_beside_both_lengths() -> None:
    class Largest(DispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, Tensor):
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
            return result

    inputs = [x.requires_grad_() for x in drawn((1, 1, 256, 512, 64), dtype=torch.float32)]
    with Largest() as mode:
        additive_scores(*inputs).sum().backward()
    page = 4096 // 4  # that a tile may be set off by
    assert mode.elements <= BLOCK_ELEMENTS + page  # of 8 * BLOCK_ELEMENTS triples


def test_half_precision_sums_in_float32() -> None:
    inputs = drawn((1, 2, 9, 11, 32), dtype=torch.bfloat16)
    got = additive_scores(*inputs)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), written(*(x.double() for x in inputs)), rtol=0, atol=1e-5)


def test_graphs_transforms_and_tensors_without_numbers_go_by_the_formula_as_written() -> None:
    inputs = drawn((1, 2, 3, 4, 5))
    assert by_blocks(*inputs)
    assert not by_blocks(*(x.to("meta") for x in inputs))
    answers: list[bool] = []

    def watched(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        answers.append(by_blocks(query, key, v))
        return additive_scores(query, key, v)

    mapped = torch.func.vmap(watched)(*(torch.stack([x, x + 1]) for x in inputs))
    torch.testing.assert_close(mapped[0], written(*inputs))
    torch.func.jvp(watched, tuple(inputs), tuple(inputs))
    torch.func.grad(lambda *x: watched(*x).sum())(*inputs)
    with torch.autograd.forward_ad.dual_level():
        watched(torch.autograd.forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])
    assert answers == [False] * 4


def test_gradients_are_as_exact_where_the_caller_left_autocast_on() -> None:
    inputs = drawn((1, 2, 40, 50, 16), dtype=torch.float32)
    found = []
    for on in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        scores = additive_scores(*leaves)
        with torch.autocast("cpu", enabled=on):
            found.append(torch.autograd.grad(scores, leaves, torch.ones_like(scores)))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("side", [40, 1200])  # heads together, and channel by channel
def test_gradients_are_the_same_whether_those_of_v_are_asked_for_or_not(side: int) -> None:
    query, key, v = (torch.randn(shape, requires_grad=True) for shape in ((1, 1, side, 8), (1, 1, side, 8), (1, 8)))
    loss = additive_scores(query, key, v).sin().sum()
    whole = torch.autograd.grad(loss, (query, key, v), retain_graph=True)
    for asked in ((0, 1), (0,), (1,), (2,)):
        inputs = [(query, key, v)[n] for n in asked]
        found = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(torch.equal(one, whole[n]) for one, n in zip(found, asked, strict=True))
    loss.backward()
    assert v.grad is not None
    assert torch.equal(v.grad, whole[2])
