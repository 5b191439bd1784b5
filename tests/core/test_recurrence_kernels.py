"""The Triton kernels of fast weights, in Triton's interpreter, against the float64 loop. Chunks are 16 tokens and blocks 16 columns here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
ORDER = ("memory", "query", "key", "value", "beta", "log_decay")
pytestmark = pytest.mark.usefixtures("launched")
both = pytest.mark.parametrize("corrects", [False, True], ids=["sum", "correction"])


def by_loop(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """By sums, or with beta by corrections."""
    outs, state = [], memory
    for t in range(key.shape[2]):
        k, u = key[:, :, t, :, None], value[:, :, t, None]
        if log_decay is not None:
            state = state * log_decay[:, :, t, None, None].exp()
        if beta is not None:
            u = beta[:, :, t, None, None] * (u - k.transpose(2, 3) @ state)
        state = state + k * u
        if query is not None:
            outs.append(torch.einsum("bhgd,bhde->bhge", query[:, :, :, t], state))
    if query is None:
        return None, state
    return torch.stack(outs, 3) if outs else query.new_zeros(*query.shape[:4], value.shape[3]), state


def by_engine(*tensors: Tensor | None, **named: Tensor) -> tuple[Tensor | None, Tensor]:
    """The same arguments."""
    given = dict.fromkeys(ORDER) | dict(zip(ORDER, tensors, strict=False)) | named
    return chunked_recurrence(**given, corrects=given["beta"] is not None, recording=True)


def drawn(shape: tuple[int, ...], decay: str = "", asked: bool = True, corrects: bool = False) -> dict[str, Tensor]:
    """Where writing corrects, keys of unit length, and strengths of which some are 0 and some 1."""
    b, groups, length, d, e = shape
    made = {
        "memory": torch.randn(b, HEADS, d, e),
        "query": torch.randn(b, HEADS, groups, length, d),
        "key": torch.randn(b, HEADS, length, d),
        "value": torch.randn(b, HEADS, length, e),
    }
    if not asked:
        del made["query"]
    if corrects:
        made["key"] = torch.nn.functional.normalize(made["key"], dim=-1)
        made["beta"] = (torch.rand(b, HEADS, length) * 1.4 - 0.2).clamp(0, 1)
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
    """Sums by the sizes of their terms, which corrections would make grow without bound, and those by `compare_beside_float32`."""
    if directions is None:
        directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    (compare_beside_float32 if "beta" in given else compare_sums)(given, directions)


def compare_beside_float32(given: dict[str, Tensor], directions: tuple[Tensor, ...]) -> None:
    """At most twice the error of the loop in float32, and 8 roundings of the largest number.

    A token with a key of unit length and a strength in [0, 1] makes no state longer, so what is rounded at it does not grow. What
    tokens leave of the gradient of the last state may be little, but roundings are of what that was.
    """
    exact = results(by_loop, given, directions, dtype=torch.float64)
    plain = results(by_loop, given, directions, dtype=torch.float32)
    mine = results(by_engine, given, directions, dtype=torch.float32)
    assert mine.keys() == exact.keys()
    for name in (n for n, x in mine.items() if x.numel()):
        x, size = mine[name], exact[name].abs().max()
        if name == "of memory":
            size = torch.maximum(size, directions[-1].abs().max())
        error, allowed = (x - exact[name]).abs().max(), 2 * (plain[name] - exact[name]).abs().max()
        assert error <= allowed + 8 * UNIT * size, f"{name}: {error}, {size} being the largest"


def compare_sums(given: dict[str, Tensor], directions: tuple[Tensor, ...]) -> None:
    """Within a few float32 roundings of each term that is summed.

    The sizes of terms are those of the loop on absolute values without decays: e^x is wrong by |x| roundings, and |x| e^x < 1.
    The gradient of a decay is a sum of products of the others, see `recurrence_triton.backward`.
    """
    exact = results(by_loop, given, directions, dtype=torch.float64)
    mine = results(by_engine, given, directions, dtype=torch.float32)
    plain = {n: x.abs() for n, x in given.items() if n != "log_decay"}
    size = results(by_loop, plain, tuple(x.abs() for x in directions), dtype=torch.float64)
    if "log_decay" in given:
        terms = (size["of key"] * plain["key"]).sum(-1)
        if "query" in given:
            terms = terms + (size["of query"] * plain["query"]).sum((2, 4))
        whole = (size["of memory"] * plain["memory"]).sum((2, 3))[..., None]
        size["of log_decay"] = terms.cumsum(2) + whole
    assert mine.keys() == exact.keys() == size.keys()
    for name, x in mine.items():
        excess = ((x - exact[name]).abs() - 8 * UNIT * size[name]).max() if x.numel() else 0
        assert excess <= 0, f"{name}: {excess} beyond its bound"


def shapes_of(given: dict[str, Tensor]) -> list[Tensor]:
    return [x for x in by_loop(*(given.get(n) for n in ORDER)) if x is not None]


@both
@pytest.mark.parametrize("decay", ["", "mild", "strong", "cut"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_states_and_gradients_are_those_of_the_loop(
    shape: tuple[int, ...], decay: str, corrects: bool, launched: list[str]
) -> None:
    compare(drawn(shape, decay, corrects=corrects))
    solve = ["solve_kernel"] * corrects
    assert launched == [*solve, "forward_kernel", *solve, "backward_kernel", "backward_kernel", "forward_kernel"]


@both
@pytest.mark.parametrize("asked", [False, True], ids=["state", "out"])
def test_gradients_of_strong_decays_are_as_exact_as_they_are_small(asked: bool, corrects: bool) -> None:
    given = drawn((1, 2, 40, 5, 20), "strong", asked, corrects)
    compare_beside_float32(given, tuple(torch.randn_like(x) for x in shapes_of(given)))


@both
@pytest.mark.parametrize("decay", ["", "mild"])
def test_without_queries_the_state_alone(decay: str, corrects: bool) -> None:
    compare(drawn((1, 1, 37, 5, 20), decay, asked=False, corrects=corrects))


def test_without_a_strength_corrections_are_whole() -> None:
    given = drawn((1, 2, 37, 5, 20), corrects=True)
    del given["beta"]
    wanted = by_loop(**given, beta=torch.ones(1, HEADS, 37))
    for mine, right in zip(chunked_recurrence(**given, corrects=True), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_wide_keys_are_read_by_parts() -> None:
    compare(drawn((1, 1, 20, 200, 20), "mild", corrects=True))


@both
@pytest.mark.parametrize("decay", ["", "mild"])
def test_shipped_chunks_give_the_same(decay: str, corrects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.engines import recurrence_triton

    monkeypatch.setattr(recurrence_triton, "is_interpreted", lambda kernel: False)
    assert recurrence_triton._tiles(40, 40) == (Configuration(32, 16, 8, 1), 64)
    compare(drawn((1, 2, 70, 40, 40), decay, corrects=corrects))


@both
@pytest.mark.parametrize("unused", ["out", "last"])
def test_where_nothing_depends_on_one_result_gradients_are_those_of_the_other(unused: str, corrects: bool) -> None:
    given = drawn((1, 2, 37, 5, 20), "mild", corrects=corrects)

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
    out, _ = by_engine(**given)
    wanted, _ = by_loop(**{n: x.double() for n, x in given.items()})
    sizes = {n: x.double() if n == "log_decay" else x.double().abs() for n, x in given.items()}
    size, _ = by_loop(**sizes)
    assert out is not None
    assert wanted is not None
    assert size is not None
    # float32's own rounding of sums of -3.001 over 16 tokens is half of 16 * 3 units, times e^-3 for the nearest; products 8 more
    assert ((out - wanted).abs() <= 12 * UNIT * size).all()


@both
def test_decays_that_forget_all_have_no_gradient(corrects: bool) -> None:
    given = drawn((1, 2, 33, 5, 3), "cut", corrects=corrects)
    directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    grad = results(by_engine, given, directions, dtype=torch.float32)["of log_decay"]
    gone = given["log_decay"].isinf()
    assert gone.any()
    assert (grad[gone] == 0).all()
    assert (grad[~gone] != 0).any()


@both
def test_any_strides_are_read_as_they_are(corrects: bool) -> None:
    given = drawn((2, 3, 33, 5, 20), "mild", corrects=corrects)
    exact = by_loop(**{n: x.double() for n, x in given.items()})
    turned = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in given.items()}
    assert not any(x.is_contiguous() for x in turned.values())
    for mine, right in zip(by_engine(**turned), exact, strict=True):
        torch.testing.assert_close(mine, right.float(), rtol=1e-5, atol=1e-5 * right.abs().max().item())
    compare(turned, tuple(torch.randn(1).expand(x.shape) for x in shapes_of(given)))


@both
def test_gradients_have_the_same_bits_each_time(corrects: bool) -> None:
    given = drawn((1, 3, 40, 20, 20), "mild", corrects=corrects)
    directions = tuple(torch.randn_like(x) for x in shapes_of(given))
    once, again = (results(by_engine, given, directions, dtype=torch.float32) for _ in range(2))
    assert all(torch.equal(x, again[n]) for n, x in once.items())


@both
def test_second_derivatives_are_those_of_the_formula(corrects: bool) -> None:
    leaves = {n: x.requires_grad_() for n, x in drawn((1, 2, 5, 3, 4), "mild", corrects=corrects).items()}

    def second(recurrence: Any) -> tuple[Tensor, ...]:
        out, last = recurrence(**leaves)
        first = torch.autograd.grad(out.square().sum() + last.pow(3).sum(), list(leaves.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))

    for mine, right in zip(second(by_engine), second(by_loop), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_read_half_precision_and_sum_in_float32(dtype: torch.dtype, corrects: bool) -> None:
    from attnlab.engines import recurrence_triton

    given = {n: x.to(dtype) for n, x in drawn((1, 2, 37, 5, 20), "mild", corrects=corrects).items()}
    tensors = [given.get(n) for n in ORDER]
    out, last, updates = recurrence_triton.forward(*tensors)
    exact = by_loop(**{n: x.double() for n, x in given.items()})
    for mine, right in zip((out, last), exact, strict=True):
        assert mine is not None
        assert right is not None
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, right.float(), rtol=1e-5, atol=1e-5 * right.abs().max().item())
    directions = tuple(torch.randn_like(x) for x in (out, last))
    found = recurrence_triton.backward(*directions, *tensors, updates)
    wanted = results(by_loop, given, directions, dtype=torch.float64)
    for name in given:
        x, right = getattr(found, name), wanted[f"of {name}"]
        assert x.dtype == dtype
        # One rounding to the dtype of the result.
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(x.double(), right, rtol=unit, atol=1e-5 * right.abs().max().item())


@both
@pytest.mark.parametrize("shape", [(1, 2, 0, 5, 3), (0, 2, 4, 5, 3)], ids=str)
def test_without_tokens_the_state_stays_and_gradients_are_zero(shape: tuple[int, ...], corrects: bool) -> None:
    compare(drawn(shape, "mild", corrects=corrects))
    by_engine(*(drawn((1, 1, 1, 1, 1)).get(n) for n in ORDER))  # no item launches nothing


@both
def test_the_rest_stays_with_torch(corrects: bool, launched: list[str]) -> None:
    given = drawn((1, 2, 20, 5, 3), "mild", corrects=corrects)
    order = [n for n in ORDER if n in given]
    tensors = tuple(given[n] for n in order)

    def run(*some: Tensor) -> tuple[Tensor | None, Tensor]:
        return by_engine(**dict(zip(order, some, strict=True)))

    run(*tensors)
    before = len(launched)
    run(*(x.double() for x in tensors))
    by_channels = given["log_decay"][..., None].expand(-1, -1, -1, 5)
    chunked_recurrence(**given | {"log_decay": by_channels}, corrects=corrects)
    by_engine(**drawn((1, 1, 2, 257, 1), corrects=corrects))
    mapped = torch.func.vmap(run)(*(torch.stack([x, x]) for x in tensors))
    torch.func.jvp(run, tensors, tensors)
    torch.export.export(_Module(order), tensors)
    assert len(launched) == before
    for one, other in zip(mapped, run(*tensors), strict=True):
        torch.testing.assert_close(one[0], other, rtol=1e-5, atol=1e-5)


class _Module(torch.nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def forward(self, *tensors: Tensor) -> tuple[Tensor | None, Tensor]:
        return by_engine(**dict(zip(self.order, tensors, strict=True)))
