"""Keys worked on once: `precompute(key)` for keys that stay, states that keep projected keys for keys that arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import InvalidInput, UnsupportedRequest, create
from attnlab.conformance.checks._watching import DispatchMode

VARIANTS = [
    ("additive", {"hidden_size": 5}),
    ("additive", {"shared": True, "bias": True, "weight_norm": True}),
    ("multiplicative", {"score": "concat", "hidden_size": 3}),
    ("multiplicative", {"score": "general"}),
    ("dot_product", {}),
]
KINDS = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)


def made(name: str, options: dict[str, Any], **sizes: int) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    variant = create(name, num_heads=4, num_kv_heads=2, head_dim=8, **sizes, **options).double()
    shapes = ((3, 4, 6, 8), (3, 2, 9, variant.key_dim), (3, 2, 9, variant.value_dim))
    return variant, [torch.randn(s, dtype=torch.float64) for s in shapes]


@KINDS
def test_queries_that_come_one_by_one_get_what_they_get_together(name: str, options: dict[str, Any]) -> None:
    variant, (query, key, value) = made(name, options)
    lengths = torch.tensor([9, 4, 0])
    whole = variant(query, key, value, key_lengths=lengths, need_weights=True)
    keys = variant.precompute(key)
    for t in range(6):
        step = keys(query[:, :, t : t + 1], value, key_lengths=lengths, need_weights=True)
        torch.testing.assert_close(step.out, whole.out[:, :, t : t + 1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step.weights, whole.weights[:, :, t : t + 1], rtol=1e-12, atol=1e-12)
    chosen = torch.tensor([2, 0, 0])
    beams = keys.reorder(chosen)(query, value[chosen]).out
    expected = variant(query, key[chosen], value[chosen]).out
    torch.testing.assert_close(beams, expected, rtol=1e-12, atol=1e-12)


@KINDS
def test_gradients_reach_keys_and_parameters(name: str, options: dict[str, Any]) -> None:
    variant, inputs = made(name, options)
    found = []
    for once in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        query, key, value = leaves
        out = variant.precompute(key)(query, value).out if once else variant(query, key, value).out
        found.append(torch.autograd.grad(out.square().sum(), [*leaves, *variant.parameters()]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


class Products(DispatchMode):
    """Counts the rows that matrix products with a parameter's shape take."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.width, self.rows = weights.shape[-1], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].shape[-1] == self.width:
            self.rows += args[0].shape[0] * args[0].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "options"), VARIANTS[:1] + VARIANTS[2:3], ids=str)
def test_a_decoding_step_projects_its_own_token_alone(name: str, options: dict[str, Any]) -> None:
    variant, _ = made(name, options, key_dim=13)
    with torch.no_grad():
        state = variant.init_state(3, dtype=torch.float64)
        prompt = [torch.randn(3, h, 50, d, dtype=torch.float64) for h, d in ((4, 8), (2, 13), (2, 13))]
        state = variant(*prompt, causal=True, state=state).state
        with Products(torch.empty(1, 13)) as mode:
            variant(*(x[:, :, :1] for x in prompt), causal=True, state=state)
    assert mode.rows == 3 * 4
    # The values, the products of weights and values aside, are as they came; keys are kept in the hidden size.
    assert state.key.shape[3] == variant.projected_width
    assert state.value.shape[1] == 2


def test_what_does_not_fit_is_refused() -> None:
    variant, (query, key, value) = made("additive", {})
    with pytest.raises(
        InvalidInput, match=r"precompute takes floating-point key \[B, 2, Lk, 8\] .*, got torch.float64 \[3, 4, 9, 8\]"
    ):
        variant.precompute(key.repeat(1, 2, 1, 1))
    with pytest.raises(InvalidInput, match=r"precompute takes floating-point key .* got list"):
        variant.precompute([1])
    keys = variant.precompute(key)
    with pytest.raises(InvalidInput, match="value must have 2 heads, as the keys had, got 1"):
        keys(query, value[:, :1])
    with pytest.raises(UnsupportedRequest, match="precomputed keys stay as they are"):
        keys(query, value, state=variant.init_state(3, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="additive"):
        keys(query, value[:, :, :4])
    assert variant.num_kv_heads == 2  # the variant itself is as it was
    assert variant(query, key, value).out.shape == (3, 4, 6, 8)


def test_a_state_made_for_other_heads_is_refused() -> None:
    variant, (query, key, value) = made("additive", {})
    other = create("additive", num_heads=4, num_kv_heads=1, head_dim=8).double()
    with pytest.raises(InvalidInput, match="made for 1 key/value heads and the call has 2"):
        variant(query, key, value, state=other.init_state(3, dtype=torch.float64))


@pytest.mark.parametrize("said", ["key_lengths", "key_mask"])
@pytest.mark.parametrize(("name", "options"), VARIANTS[:1] + VARIANTS[2:3], ids=str)
def test_absent_slots_reach_no_parameter(name: str, options: dict[str, Any], said: str) -> None:
    variant, (query, key, value) = made(name, options)
    absent = {"key_lengths": torch.tensor([9, 4, 0]), "key_mask": torch.arange(9) < torch.tensor([[9], [4], [0]])}[said]
    out = variant(query, key, value, **{said: absent}).out
    wanted = torch.autograd.grad(out.square().sum(), list(variant.parameters()))
    hole = torch.arange(9)[None, :] >= torch.tensor([[9], [4], [0]])
    key, value = (x.masked_fill(hole[:, None, :, None], torch.nan) for x in (key, value))
    out = variant.precompute(key, **{said: absent})(query, value, **{said: absent}).out
    for mine, right in zip(torch.autograd.grad(out.square().sum(), list(variant.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-11)


def test_what_no_call_could_use_is_refused_at_once() -> None:
    variant, (_, key, _) = made("additive", {})
    for bad in (key.long(), key.to_sparse(), key.to("meta")):
        with pytest.raises(InvalidInput, match="precompute takes floating-point key"):
            variant.precompute(bad)
    with pytest.raises(InvalidInput, match="reorder: index must be an int32 or int64 tensor"):
        variant.precompute(key).reorder([0, 1])
    with pytest.raises(InvalidInput, match="key_lengths must be"):
        variant.precompute(key, key_lengths=torch.tensor([1, 2]))


def test_a_cache_of_projected_keys_is_of_no_use_to_others() -> None:
    variant, inputs = made("additive", {})
    state = variant(*(x[:, :, :1] for x in inputs), state=variant.init_state(3, dtype=torch.float64)).state
    other, _ = made("dot_product", {})
    with pytest.raises(InvalidInput, match="must be a CacheState from its own init_state, got a ProjectedState"):
        other(*(x[:, :, :1] for x in inputs), state=state)
