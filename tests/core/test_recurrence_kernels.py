"""The Triton kernels of fast weights, in Triton's interpreter, against the float64 loop. Chunks are 16 tokens and blocks 16 columns here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from attnlab import create
from attnlab.engines import Configuration, chunked_recurrence

UNIT = 2.0**-23
# B, G, L, D, E: one token, channel and query; tails of chunks and of blocks; several of both; one width beyond the other.
SHAPES = [
    (2, 1, 1, 1, 1),
    (2, 3, 17, 5, 1),
    (1, 1, 64, 40, 5),
    (1, 3, 64, 1, 40),
    (1, 3, 130, 5, 40),
    (1, 1, 130, 40, 40),
]
HEADS = 2
ORDER = ("memory", "query", "key", "value", "log_decay")


@pytest.fixture(autouse=True)
def launched(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each test's calls go through the kernels: the names of those launched, of which there must be some."""
    from attnlab.engines import recurrence_triton

    names: list[str] = []
    real = recurrence_triton.run_kernel

    def run_kernel(kernel: Any, *rest: Any, **arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        real(kernel, *rest, **arguments)

    monkeypatch.setattr(recurrence_triton, "run_kernel", run_kernel)
    with numpy.errstate(over="ignore", invalid="ignore"):  # what a GPU computes without a word
        yield names
    assert names


def by_loop(
    memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    outs, state = [], memory
    for t in range(key.shape[2]):
        if log_decay is not None:
            state = state * log_decay[:, :, t, None, None].exp()
        state = state + key[:, :, t, :, None] * value[:, :, t, None]
        if query is not None:
            outs.append(torch.einsum("bhgd,bhde->bhge", query[:, :, :, t], state))
    if query is None:
        return None, state
    return torch.stack(outs, 3) if outs else query.new_zeros(*query.shape[:4], value.shape[3]), state


def by_engine(
    memory: Tensor, query: Tensor | None, key: Tensor, value: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    return chunked_recurrence(memory, query, key, value, log_decay=log_decay, recording=True)


def drawn(shape: tuple[int, ...], decay: str = "", asked: bool = True) -> dict[str, Tensor]:
    b, groups, length, d, e = shape
    made = {
        "memory": torch.randn(b, HEADS, d, e),
        "query": torch.randn(b, HEADS, groups, length, d),
        "key": torch.randn(b, HEADS, length, d),
        "value": torch.randn(b, HEADS, length, e),
    }
    if not asked:
        del made["query"]
    if decay:
        g = -torch.nn.functional.softplus(torch.randn(b, HEADS, length))
        if decay == "strong":
            g = g * 30
        if decay == "cut":
            g[torch.rand_like(g) < 0.2] = -torch.inf
        made["log_decay"] = g
    return made


def results(
    recurrence: Any, given: dict[str, Tensor], directions: tuple[Tensor, ...], **casts: Any
) -> dict[str, Tensor]:
    """What is read, the last state and the gradients along directions, in float64; a direction for each result that is used."""
    leaves = {n: x.detach().to(**casts).requires_grad_() for n, x in given.items()}
    made = recurrence(*(leaves.get(n) for n in ORDER))
    there = [x for x in made if x is not None]
    total = sum((x * direction.to(x.dtype)).sum() for x, direction in zip(there, directions, strict=True))
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = {"last": made[1]} | {f"of {n}": g for n, g in zip(leaves, grads, strict=True)}
    if made[0] is not None:
        found["out"] = made[0]
    return {n: x.detach().double() for n, x in found.items()}


def compare(given: dict[str, Tensor], directions: tuple[Tensor, ...] | None = None) -> None:
    """Within a few float32 roundings of each term that is summed.

    The sizes of terms are those of the loop on absolute values without decays: e^x is wrong by |x| roundings, and |x| e^x < 1.
    The gradient of a decay is a sum of products of the others, see `recurrence_triton.backward`.
    """
    if directions is None:
        directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    exact = results(by_loop, given, directions, dtype=torch.float64)
    mine = results(by_engine, given, directions, dtype=torch.float32)
    plain = {n: x.abs() for n, x in given.items() if n != "log_decay"}
    size = results(by_loop, plain, tuple(x.abs() for x in directions), dtype=torch.float64)
    if "log_decay" in given:
        terms = (size["of key"] * plain["key"]).sum(-1)
        if "query" in given:
            terms = terms + (size["of query"] * plain["query"]).sum((2, 4))
        whole = (size["last"] * directions[-1].abs()).sum((2, 3))[..., None]
        size["of log_decay"] = terms.flip(2).cumsum(2).flip(2) + whole
    assert mine.keys() == exact.keys() == size.keys()
    for name, x in mine.items():
        excess = ((x - exact[name]).abs() - 8 * UNIT * size[name]).max() if x.numel() else 0
        assert excess <= 0, f"{name}: {excess} beyond its bound"


def shapes_of(given: dict[str, Tensor]) -> list[Tensor]:
    return [x for x in by_loop(*(given.get(n) for n in ORDER)) if x is not None]


@pytest.mark.parametrize("decay", ["", "mild", "strong", "cut"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_states_and_gradients_are_those_of_the_loop(
    shape: tuple[int, ...], decay: str, launched: list[str]
) -> None:
    compare(drawn(shape, decay))
    assert launched == ["forward_kernel"] * 2 + ["backward_kernel"] * 2


@pytest.mark.parametrize("decay", ["", "mild"])
def test_without_queries_the_state_alone(decay: str) -> None:
    compare(drawn((1, 1, 37, 5, 20), decay, asked=False))


@pytest.mark.parametrize("decay", ["", "mild"])
def test_shipped_chunks_give_the_same(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.engines import recurrence_triton

    monkeypatch.setattr(recurrence_triton, "is_interpreted", lambda kernel: False)
    assert recurrence_triton._tiles(40, 40) == (Configuration(32, 16, 8, 1), 64)
    compare(drawn((1, 2, 70, 40, 40), decay))


@pytest.mark.parametrize("unused", ["out", "last"])
def test_where_nothing_depends_on_one_result_gradients_are_those_of_the_other(unused: str) -> None:
    given = drawn((1, 2, 37, 5, 20), "mild")

    def partly(recurrence: Any) -> Any:
        def run(*tensors: Tensor) -> tuple[Tensor | None, Tensor]:
            out, last = recurrence(*tensors)
            assert out is not None
            return (None, last) if unused == "out" else (None, out)

        return run

    direction = (torch.randn_like(shapes_of(given)[1 if unused == "out" else 0]),)
    exact = results(partly(by_loop), given, direction, dtype=torch.float64)
    mine = results(partly(by_engine), given, direction, dtype=torch.float32)
    for name, x in mine.items():
        torch.testing.assert_close(x, exact[name], rtol=1e-5, atol=1e-5 * exact[name].abs().max().item())


def test_a_decay_long_ago_does_not_round_those_of_today() -> None:
    """Sums of log-decays reach -1840 in a chunk, whose float32 differences would be wrong in the fourth digit."""
    given = drawn((1, 2, 64, 5, 3)) | {"log_decay": torch.full((1, HEADS, 64), -3.001)}
    given["log_decay"][:, :, ::9] = -900.0
    out, _ = by_engine(*(given[n] for n in ORDER))
    wanted, _ = by_loop(*(given[n].double() for n in ORDER))
    size, _ = by_loop(*(given[n].double().abs() for n in ORDER[:4]), given["log_decay"].double())
    assert out is not None
    assert wanted is not None
    assert size is not None
    # float32's own rounding of sums of -3.001 over 16 tokens is half of 16 * 3 units, times e^-3 for the nearest; products 8 more
    assert ((out - wanted).abs() <= 12 * UNIT * size).all()


def test_decays_that_forget_all_have_no_gradient() -> None:
    given = drawn((1, 2, 33, 5, 3), "cut")
    directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    grad = results(by_engine, given, directions, dtype=torch.float32)["of log_decay"]
    gone = given["log_decay"].isinf()
    assert gone.any()
    assert (grad[gone] == 0).all()
    assert (grad[~gone] != 0).any()


def test_any_strides_are_read_as_they_are() -> None:
    given = drawn((2, 3, 33, 5, 20), "mild")
    exact = by_loop(*(given[n].double() for n in ORDER))
    turned = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in given.items()}
    assert not any(x.is_contiguous() for x in turned.values())
    for mine, right in zip(by_engine(*(turned[n] for n in ORDER)), exact, strict=True):
        torch.testing.assert_close(mine, right.float(), rtol=1e-5, atol=1e-5 * right.abs().max().item())
    compare(turned, tuple(torch.randn(1).expand(x.shape) for x in shapes_of(given)))


def test_gradients_have_the_same_bits_each_time() -> None:
    given = drawn((1, 3, 40, 20, 20), "mild")
    directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    once, again = (results(by_engine, given, directions, dtype=torch.float32) for _ in range(2))
    assert all(torch.equal(x, again[n]) for n, x in once.items())


def test_second_derivatives_are_those_of_the_formula() -> None:
    leaves = {n: x.requires_grad_() for n, x in drawn((1, 2, 5, 3, 4), "mild").items()}

    def second(recurrence: Any) -> tuple[Tensor, ...]:
        out, last = recurrence(*(leaves[n] for n in ORDER))
        first = torch.autograd.grad(
            out.square().sum() + last.pow(3).sum(), list(leaves.values()), create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))

    for mine, right in zip(second(by_engine), second(by_loop), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_read_half_precision_and_sum_in_float32(dtype: torch.dtype) -> None:
    from attnlab.engines import recurrence_triton

    given = {n: x.to(dtype) for n, x in drawn((1, 2, 37, 5, 20), "mild").items()}
    out, last = recurrence_triton.forward(*(given[n] for n in ORDER))
    exact = by_loop(*(given[n].double() for n in ORDER))
    for mine, right in zip((out, last), exact, strict=True):
        assert mine is not None
        assert right is not None
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, right.float(), rtol=1e-5, atol=1e-5 * right.abs().max().item())
    directions = tuple(torch.randn_like(x) for x in (out, last))
    found = recurrence_triton.backward(*directions, *(given[n] for n in ORDER), last)
    wanted = results(by_loop, given, directions, dtype=torch.float64)
    for name, x in found._asdict().items():
        right = wanted[f"of {name}"]
        assert x.dtype == dtype
        # One rounding to the dtype of the result.
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(x.double(), right, rtol=unit, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("shape", [(1, 2, 0, 5, 3), (0, 2, 4, 5, 3)], ids=str)
def test_without_tokens_the_state_stays_and_gradients_are_zero(shape: tuple[int, ...]) -> None:
    compare(drawn(shape, "mild"))
    by_engine(*(drawn((1, 1, 1, 1, 1)).get(n) for n in ORDER))  # no item launches nothing


def test_the_rest_stays_with_torch(launched: list[str]) -> None:
    given = drawn((1, 2, 20, 5, 3), "mild")
    tensors = [given[n] for n in ORDER]
    by_engine(*tensors)
    before = len(launched)
    by_engine(*(x.double() for x in tensors))
    chunked_recurrence(*tensors[:4], log_decay=tensors[4], corrects=True)
    chunked_recurrence(*tensors[:4], log_decay=tensors[4][..., None].expand(-1, -1, -1, 5))
    wide = drawn((1, 1, 2, 257, 1))
    by_engine(*(wide.get(n) for n in ORDER))
    mapped = torch.func.vmap(by_engine)(*(torch.stack([x, x]) for x in tensors))
    torch.func.jvp(by_engine, tuple(tensors), tuple(tensors))
    torch.export.export(_Module(), tuple(tensors))
    assert len(launched) == before
    for one, other in zip(mapped, by_engine(*tensors), strict=True):
        torch.testing.assert_close(one[0], other, rtol=1e-5, atol=1e-5)


class _Module(torch.nn.Module):
    def forward(self, *tensors: Tensor) -> tuple[Tensor | None, Tensor]:
        return by_engine(*tensors)


VARIANTS: list[tuple[str, dict[str, Any], int]] = [
    ("fast_weights", {}, 2),
    ("gated", {"decay": "head"}, 2),
    ("retention", {}, 4),
]


@pytest.mark.parametrize("call", ["causal", "all", "padded", "state"])
@pytest.mark.parametrize(("name", "options", "kv_heads"), VARIANTS, ids=[v[0] for v in VARIANTS])
def test_the_variants_answer_and_train_as_by_the_loop(
    name: str, options: dict[str, Any], kv_heads: int, call: str, launched: list[str]
) -> None:
    variant = create(name, num_heads=4, num_kv_heads=kv_heads, head_dim=8, value_dim=6, **options)
    length, first = 37, 20
    inputs = [torch.randn(2, n, length, w) for n, w in ((4, 8), (kv_heads, 8), (kv_heads, 6))]
    if variant.gates:
        inputs.append(-torch.rand(2, kv_heads, length))
    present = torch.rand(2, length) < 0.7

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]

        def part(at: slice, **features: Any) -> Any:
            query, key, value, *gate = (x[:, :, at] for x in leaves)
            gates = {"log_decay": gate[0]} if gate else None
            return variant(query, key, value, gates=gates, causal=call != "all", **features)

        everything = slice(None)
        if call == "state":
            one = part(slice(0, first), state=variant.init_state(2, dtype=dtype))
            other = part(slice(first, None), state=one.state)
            out = torch.cat([one.out, other.out], 2)
        else:
            out = part(everything, **({"key_mask": present} if call == "padded" else {})).out
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    by_kernels = run(torch.float32)
    assert {"forward_kernel", "backward_kernel"} == set(launched)
    count = len(launched)
    exact = run(torch.float64)
    assert len(launched) == count
    for mine, right in zip(by_kernels, exact, strict=True):
        torch.testing.assert_close(
            mine.double(), right, rtol=2e-5, atol=2e-5 * max(1.0, right.abs().max().item())
        )
