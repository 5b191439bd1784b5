"""F21: what was given in the wrong place, or returned in the wrong form, is told once and with what to do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attnlab
from attnlab import Attention, Call, Capabilities, InvalidInput, PluginError


class Bare(Attention):
    formula = "bare"
    capabilities = Capabilities(cross_lengths=True, dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:  # type: ignore[override]
        return value


def test_a_bare_tensor_is_told_with_what_to_write() -> None:
    with pytest.raises(PluginError, match=r"must return an AttentionOutput, got a Tensor; write `return attnlab\.A"):
        Bare(num_heads=2, head_dim=4)(*torch.randn(3, 1, 2, 5, 4))


def test_the_checks_tell_it_once() -> None:
    with pytest.raises(PluginError, match="must return an AttentionOutput"):
        attnlab.run_checks(Bare, quick=True)


@pytest.mark.parametrize("call", [attnlab.attend, attnlab.attention])
def test_an_option_given_to_a_call_points_to_create(call: object) -> None:
    with pytest.raises(InvalidInput, match=r"attnlab\.create\('sliding_window', num_heads=2, head_dim=4, left=3\)"):
        call(*torch.randn(3, 1, 2, 5, 4), variant="sliding_window", causal=True, left=3)  # type: ignore[operator]


def test_an_argument_of_a_call_given_to_create_points_to_the_call() -> None:
    with pytest.raises(InvalidInput, match="causal is an argument of each call"):
        attnlab.create("sliding_window", num_heads=2, head_dim=4, causal=True)
