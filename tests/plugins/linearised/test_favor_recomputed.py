"""F05: a forward that is computed again in the backward has the features of that forward, whatever was drawn in between."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attnlab
from attnlab import InvalidInput


def _make(interval: int = 1) -> Any:
    return attnlab.create("linearised", num_heads=2, head_dim=8, feature_map="favor", redraw_interval=interval).double()


def _tokens(count: int) -> list[Tensor]:
    return [torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def _call(variant: Any, x: Tensor) -> Tensor:
    out: Tensor = variant(x, x, x, causal=True).out
    return out


def _wanted(variant: Any, tokens: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients without a checkpoint."""
    fresh = [x.detach().clone().requires_grad_() for x in tokens]
    outs = [_call(variant, x) for x in fresh]
    sum(out.square().sum() for out in outs).backward()  # type: ignore[union-attr]
    return [out.detach() for out in outs], [x.grad for x in fresh]  # type: ignore[misc]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("forwards", [1, 2, 5])
@pytest.mark.parametrize("redrawn", [False, True])
def test_checkpointed_forwards_before_one_backward(interval: int, forwards: int, redrawn: bool) -> None:
    variant, tokens = _make(interval), _tokens(forwards)
    outs, gradients = _wanted(copy.deepcopy(variant), tokens)
    made = [checkpoint(_call, variant, x, use_reentrant=False) for x in tokens]
    if redrawn:
        variant.redraw()
    sum(out.square().sum() for out in made).backward()
    for out, want in zip(made, outs, strict=True):
        torch.testing.assert_close(out, want)
    for x, want in zip(tokens, gradients, strict=True):
        torch.testing.assert_close(x.grad, want)


def test_a_reentrant_checkpoint_with_redraws_before_its_backward() -> None:
    variant, (x, other) = _make(), _tokens(2)
    still = copy.deepcopy(variant).eval()
    (want,), (gradient,) = _wanted(still, [x])
    out = checkpoint(_call, variant, x, use_reentrant=True)
    for _ in range(3):  # which draw anew
        _call(variant, other)
    out.square().sum().backward()
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(x.grad, gradient)


def test_the_same_tokens_twice_are_two_forwards() -> None:
    variant, (x,) = _make(), _tokens(1)
    _, gradients = _wanted(copy.deepcopy(variant), [x, x])
    sum(checkpoint(_call, variant, x, use_reentrant=False).square().sum() for _ in range(2)).backward()
    torch.testing.assert_close(x.grad, gradients[0] + gradients[1])


def test_without_torchs_generator_a_forward_is_not_known_again() -> None:
    variant, tokens = _make(), _tokens(2)
    outs = [checkpoint(_call, variant, x, use_reentrant=False, preserve_rng_state=False) for x in tokens]
    with pytest.raises(InvalidInput, match="preserve_rng_state=True"):
        sum(out.sum() for out in outs).backward()


def test_a_backward_of_a_plain_forward_keeps_its_features() -> None:
    variant, (x, other) = _make(), _tokens(2)
    _, (gradient,) = _wanted(copy.deepcopy(variant), [x])
    out = _call(variant, x)
    _call(variant, other)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, gradient)


def test_a_redraw_by_another_thread_does_not_reach_into_a_call() -> None:
    variant, (x,) = _make(100), _tokens(1)
    want = _call(copy.deepcopy(variant), x)
    inside = threading.Event()
    real = variant.feature_map

    def feature_map(*arguments: Any, **more: Any) -> Tensor:
        made: Tensor = real(*arguments, **more)
        if not inside.is_set():
            inside.set()
            thread = threading.Thread(target=variant.redraw)
            thread.start()
            thread.join()
        return made

    variant.feature_map = feature_map
    torch.testing.assert_close(_call(variant, x), want)
    assert int(variant.drawn[0]) == 1
