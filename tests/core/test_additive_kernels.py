"""The Triton kernels of the additive score, in Triton's interpreter, against the float64 formula. Blocks are 16 by 32 here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from attnlab import create
from attnlab.engines import additive_scores
from attnlab.engines.additive import _by_blocks as by_blocks

# [B, H, tq, tk, A]: one row and one channel, tails of blocks and of groups of channels, several blocks on both sides.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 3),
    (1, 2, 17, 33, 16),
    (1, 2, 40, 70, 40),
    (2, 1, 33, 1, 64),
    (1, 1, 3, 65, 100),
]
UNIT = 2.0**-23


@pytest.fixture(autouse=True)
def launched(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each test's calls go through the kernels: the names of those launched, of which there must be some."""
    from attnlab.engines import additive_triton

    names: list[str] = []
    real = additive_triton.run_kernel

    def run_kernel(kernel: Any, *rest: Any, **arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        real(kernel, *rest, **arguments)

    monkeypatch.setattr(additive_triton, "run_kernel", run_kernel)
    with numpy.errstate(over="ignore", invalid="ignore"):  # what a GPU computes without a word
        yield names
    assert names


def drawn(shape: tuple[int, ...], spread: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    b, h, tq, tk, a = shape
    query, key, v = torch.randn(b, h, tq, a), torch.randn(b, h, tk, a), torch.randn(h, a)
    return [(query * spread).to(dtype), (key * spread).to(dtype), v.to(dtype)]


def written(query: Tensor, key: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(query[:, :, :, None] + key[:, :, None]) * v[:, None, None]).sum(-1)


def compare(inputs: list[Tensor], direction: Tensor | None = None, rounding: float = 0.0) -> None:
    """Scores and the three gradients within a few float32 roundings of each term; `rounding` is that of the inputs' dtype."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    others = [x.detach().requires_grad_() for x in inputs]
    exact, got = written(*leaves), additive_scores(*others)
    if direction is None:
        direction = torch.randn(exact.shape)
    assert got.dtype == torch.float32
    terms = inputs[2].double().abs().sum(-1).amax().item()
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=8 * UNIT * terms)
    with torch.no_grad():
        assert torch.equal(additive_scores(*inputs), got)
    found = torch.autograd.grad(got, others, direction)
    wanted = torch.autograd.grad(exact, leaves, direction.double())
    size = direction.double().abs().sum((2, 3)).amax().item() * max(terms, 1.0)
    for mine, theirs, x in zip(found, wanted, inputs, strict=True):
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=rounding, atol=8 * UNIT * size)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], spread: float) -> None:
    compare(drawn(shape, spread))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    compare(drawn((1, 2, 19, 40, 24), dtype=dtype), rounding=torch.finfo(dtype).eps)


def test_dtypes_may_differ() -> None:
    query, key, v = drawn((1, 2, 5, 6, 7))
    compare([query.half(), key.bfloat16(), v], rounding=2.0**-8)


@pytest.mark.parametrize("far", [19.9, 20.1, 43.0, 50.0, 88.0, 100.0, 1e6])
def test_sides_that_cancel_are_exact_however_far_they_are(far: float) -> None:
    left = torch.tensor([far, -far, far]).view(1, 1, 1, 3)
    right = torch.tensor([[-far, far, -far], [-far + 7, far - 3, 0.25 - far]]).view(1, 1, 2, 3)
    compare([left, right, torch.tensor([[1.0, 2.0, -0.5]])])


def test_near_and_far_blocks_stand_beside_each_other(launched: list[str]) -> None:
    query, key, v = drawn((1, 2, 40, 70, 5))
    query[0, 0, 20, 3] = 50.0  # block 1 of 3
    key[0, 0, 68, 3] = -43.0  # block 2 of 3
    key[0, 1, 2, 0] = -1e30
    compare([query, key, v])
    assert {"prepare_kernel", "scores_kernel", "gradient_kernel"} == set(launched)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_goes_where_the_formula_sends_it(bad: float, side: str) -> None:
    query, key, v = drawn((1, 2, 20, 36, 5))
    (query if side == "query" else key)[0, 1, 17, 2] = bad
    leaves = [x.double().requires_grad_() for x in (query, key, v)]
    others = [x.requires_grad_() for x in (query, key, v)]
    exact, got = written(*leaves), additive_scores(*others)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5, equal_nan=True)
    direction = torch.randn(exact.shape)
    for mine, theirs in zip(
        torch.autograd.grad(got, others, direction), torch.autograd.grad(exact, leaves, direction.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-4, equal_nan=True)
    assert got.isnan().any() == (bad != bad)


def test_opposite_infinities_and_infinite_weights_give_what_the_formula_gives() -> None:
    query, key, v = drawn((1, 1, 2, 2, 3))
    query[0, 0, 0, 0], key[0, 0, 0, 0], v[0, 2] = torch.inf, -torch.inf, torch.inf
    torch.testing.assert_close(additive_scores(query, key, v), written(query, key, v), equal_nan=True)
    assert additive_scores(query, key, v).isinf().any()


def test_any_strides_will_do() -> None:
    query = torch.randn(9, 2, 1, 20).permute(2, 1, 3, 0)  # [1, 2, 20, 9], channels apart
    key = torch.randn(1, 1, 33, 18)[..., ::2].expand(1, 2, 33, 9)
    v = torch.randn(9, 2).T
    compare([query, key, v], direction=torch.randn(1, 2, 33, 20).transpose(2, 3))
    compare([query, key, v], direction=torch.ones(1).expand(1, 2, 20, 33))


@pytest.mark.parametrize("shape", [(1, 2, 0, 5, 3), (1, 2, 5, 0, 3), (0, 2, 5, 4, 3)], ids=str)
def test_without_queries_or_keys_gradients_are_zero(shape: tuple[int, ...], launched: list[str]) -> None:
    inputs = [x.requires_grad_() for x in drawn(shape)]
    scores = additive_scores(*inputs)
    assert scores.shape == (*shape[:2], shape[2], shape[3])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(scores.sum(), inputs))
    assert "gradient_kernel" in launched


def test_gradients_have_the_same_bits_each_time() -> None:
    inputs = [x.requires_grad_() for x in drawn((2, 2, 40, 70, 6))]
    direction = torch.randn(2, 2, 40, 70)
    once, again = (torch.autograd.grad(additive_scores(*inputs), inputs, direction) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_second_derivatives_are_those_of_the_formula() -> None:
    inputs = [x.requires_grad_() for x in drawn((1, 2, 3, 4, 5))]

    def second(scores: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(scores.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    for mine, theirs in zip(second(additive_scores(*inputs)), second(written(*inputs)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_but_the_inputs_is_kept_and_no_temporary_has_the_hidden_size_beside_both_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnlab.conformance.checks._watching import DispatchMode
    from attnlab.engines import additive_triton

    class Largest(DispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, Tensor):
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
            return result

    kept: list[Tensor] = []
    inputs = [x.requires_grad_() for x in drawn((1, 1, 256, 512, 64))]
    additive_scores(*(x[..., :1, :4] if x.dim() == 4 else x[:, :4] for x in inputs))  # one real launch
    monkeypatch.setattr(additive_triton, "run_kernel", lambda *a, **k: None)
    with Largest() as mode, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        scores = additive_scores(*inputs)
        torch.autograd.grad(scores, inputs, torch.ones_like(scores))
    assert 256 * 512 <= mode.elements <= 2 * 256 * 512  # scores, or both planes of the keys
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}


def test_graphs_and_transforms_go_by_the_formula_as_written(launched: list[str]) -> None:
    inputs = drawn((1, 2, 3, 4, 5))
    assert by_blocks(*inputs)
    additive_scores(*inputs)
    before = len(launched)
    mapped = torch.func.vmap(additive_scores)(*(torch.stack([x, x + 1]) for x in inputs))
    torch.testing.assert_close(mapped[0], written(*inputs))
    torch.func.jvp(additive_scores, tuple(inputs), tuple(inputs))
    torch.export.export(_Module(), tuple(inputs))
    assert len(launched) == before


class _Module(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        return additive_scores(query, key, v)


def test_float64_stays_with_torch(launched: list[str]) -> None:
    inputs = [x.double() for x in drawn((1, 2, 3, 4, 5))]
    torch.testing.assert_close(additive_scores(*inputs), written(*inputs), rtol=1e-13, atol=1e-13)
    assert not launched
    additive_scores(*(x.float() for x in inputs))


VARIANTS: list[tuple[str, dict[str, Any]]] = [("additive", {}), ("multiplicative", {"score": "concat"})]


@pytest.mark.parametrize("asked", ["plain", "causal", "key_mask", "bias", "softcap, window"])
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=["additive", "concat"])
def test_the_variants_answer_and_train_as_by_torch(
    name: str, options: dict[str, Any], asked: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    variant = create(name, num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6, hidden_size=9, **options)
    inputs = [torch.randn(2, 4, 19, 8), torch.randn(2, 2, 19, 8), torch.randn(2, 2, 19, 6)]
    features: dict[str, Any] = {
        "plain": {},
        "causal": {"causal": True},
        "key_mask": {"key_mask": torch.rand(2, 19) < 0.7},
        "bias": {"bias": torch.randn(1, 4, 19, 19), "causal": True},
        "softcap, window": {"softcap": 2.0, "window": (5, 2)},
    }[asked]
    learned = list(variant.parameters())
    assert variant.tile_cost_of(inputs[0]) <= 1 < variant.options["hidden_size"]

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        variant.to(dtype)
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        given = {n: x.to(dtype) if n == "bias" else x for n, x in features.items()}
        out = variant(*leaves, **given).out
        return out.double(), *(g.double() for g in torch.autograd.grad(out.square().sum(), [*leaves, *learned]))

    by_kernels = run(torch.float32)
    assert "gradient_kernel" in launched
    count = len(launched)
    exact = run(torch.float64)
    assert len(launched) == count
    for mine, theirs in zip(by_kernels, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5 * max(1.0, theirs.abs().max().item()))


def test_tiles_of_a_long_input_are_recomputed_by_kernels(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    from attnlab.engines import tiled

    variant = create("additive", num_heads=2, head_dim=4)
    x = torch.randn(1, 2, 40, 4)
    whole = variant(x, x, x, causal=True).out
    monkeypatch.setattr(tiled, "PLAIN_ELEMENTS", 1)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", int(2 * 16 * 16 * variant.tile_cost_of(x)))
    monkeypatch.setattr(tiled, "FEWEST_ROWS", 1000)  # no whole rows
    monkeypatch.setattr(tiled, "SMALLEST_SIDE", 16)
    before = launched.count("scores_kernel")
    leaf = x.clone().requires_grad_()
    out = variant(leaf, leaf, leaf, causal=True).out
    # Six tiles: the first row is one and is made once, five are made for their maxima and for their sums.
    assert launched.count("scores_kernel") - before == 11
    torch.testing.assert_close(out, whole)
    out.sum().backward()
    assert launched.count("scores_kernel") - before == 16
