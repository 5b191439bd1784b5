"""The chunked recurrence is the plain loop, forward and backward, for every chunk, gate and length; its exponents never overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnlab.conformance.checks._watching import DispatchMode
from attnlab.engines import chunked_recurrence

CLOSE = {"atol": 1e-10, "rtol": 1e-10}  # float64
B, H, G, D, E = 1, 2, 2, 5, 3


def by_loop(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    corrects: bool,
) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(key.shape[2]):
        if log_decay is not None:
            g = log_decay[:, :, t]
            state = state * torch.exp(g.reshape(*g.shape[:2], -1, 1))
        k, u = key[:, :, t], value[:, :, t]
        if corrects:
            u = u - torch.einsum("bhd,bhde->bhe", k, state)
        if beta is not None:
            u = u * beta[:, :, t, None]
        state = state + torch.einsum("bhd,bhe->bhde", k, u)
        outs.append(torch.einsum("bhgd,bhde->bhge", query[:, :, :, t], state))
    return torch.stack(outs, 3), state


def drawn(length: int, decay: str, beta: bool) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    made = {
        "state": normal(B, H, D, E),
        "query": normal(B, H, G, length, D),
        "key": torch.nn.functional.normalize(normal(B, H, length, D), dim=-1),
        "value": normal(B, H, length, E),
    }
    if beta:
        made["beta"] = torch.rand(B, H, length, dtype=torch.float64)
    if decay:
        width = (D,) if decay == "channel" else ()
        made["log_decay"] = -torch.nn.functional.softplus(normal(B, H, length, *width))
    return {name: x.requires_grad_() for name, x in made.items()}


@pytest.mark.parametrize("corrects", [False, True], ids=["sum", "correction"])
@pytest.mark.parametrize("beta", [False, True], ids=["", "beta"])
@pytest.mark.parametrize("decay", ["", "head", "channel"])
@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (37, 1), (37, 16), (130, 64), (130, 100), (40, 500), (600, 64)])
def test_it_is_the_loop_with_its_gradients(length: int, chunk: int, decay: str, beta: bool, corrects: bool) -> None:
    given = drawn(length, decay, beta)
    state, query, key, value = (given[n] for n in ("state", "query", "key", "value"))
    gates = {n: given.get(n) for n in ("beta", "log_decay")}
    out, last = chunked_recurrence(state, query, key, value, corrects=corrects, chunk=chunk, recording=True, **gates)
    wanted, final = by_loop(state, query, key, value, corrects=corrects, **gates)
    assert out is not None
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(last, final, **CLOSE)
    to_out, to_state = torch.randn_like(out), torch.randn_like(last)
    found, right = (
        torch.autograd.grad((o * to_out).sum() + (s * to_state).sum(), list(given.values()))
        for o, s in ((out, last), (wanted, final))
    )
    for name, one, other in zip(given, found, right, strict=True):
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_tokens_that_forget_all_and_tokens_that_forget_much_are_exact(decay: str) -> None:
    given = {n: x.detach() for n, x in drawn(150, decay, beta=True).items()}
    g = given["log_decay"] * 30
    g[torch.rand_like(g) < 0.2] = -torch.inf
    named = {"beta": given["beta"], "log_decay": g, "corrects": True}
    out, last = chunked_recurrence(*(given[n] for n in ("state", "query", "key", "value")), **named)
    wanted, final = by_loop(*(given[n] for n in ("state", "query", "key", "value")), **named)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(last, final, **CLOSE)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_in_float32_a_decay_long_ago_does_not_round_those_of_today(decay: str) -> None:
    """Sums of log-decays of -3 a token reach -190 in a chunk, whose float32 differences would be wrong in the fifth digit."""
    given = {n: x.detach() for n, x in drawn(64, decay, beta=False).items()}
    given["log_decay"] = torch.full_like(given["log_decay"], -3.001)
    names = ("state", "query", "key", "value")
    wanted, _ = by_loop(*(given[n] for n in names), beta=None, log_decay=given["log_decay"], corrects=False)
    out, _ = chunked_recurrence(*(given[n].float() for n in names), log_decay=given["log_decay"].float())
    assert out is not None
    scale = by_loop(*(given[n].abs() for n in names), beta=None, log_decay=given["log_decay"], corrects=False)[0]
    # float32's own rounding of -3.001 over 16 tokens is 16 * 1.2e-7, a product of D terms D * 6e-8
    assert ((out - wanted).abs() <= 4e-6 * scale).all()


def test_without_queries_the_state_alone() -> None:
    given = drawn(70, "head", beta=True)
    names = ("state", "key", "value")
    state, key, value = (given[n] for n in names)
    gates = {n: given[n] for n in ("beta", "log_decay")}
    out, last = chunked_recurrence(state, None, key, value, corrects=True, **gates)
    assert out is None
    _, wanted = chunked_recurrence(state, given["query"], key, value, corrects=True, **gates)
    torch.testing.assert_close(last, wanted, **CLOSE)


def test_no_tokens_leave_the_state() -> None:
    given = drawn(0, "", beta=False)
    out, last = chunked_recurrence(*(given[n] for n in ("state", "query", "key", "value")))
    assert out is not None
    assert out.shape == (B, H, G, 0, E)
    assert torch.equal(last, given["state"])


@pytest.mark.parametrize("decay", ["", "head", "channel"])
def test_its_largest_temporary_does_not_grow_with_the_length(decay: str) -> None:
    class Largest(DispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(x, Tensor) and x.dim() > 4:  # the parts of a block have an axis of chunks
                    self.elements = max(self.elements, x.numel())
            return result

    found = []
    for length in (1024, 4096):
        given = {n: x.detach() for n, x in drawn(length, decay, beta=True).items()}
        names = ("state", "query", "key", "value")
        gates = {n: given.get(n) for n in ("beta", "log_decay")}
        with Largest() as mode:
            chunked_recurrence(*(given[n] for n in names), corrects=True, **gates)
        found.append(mode.elements)
    assert found[0] == found[1] > 0
