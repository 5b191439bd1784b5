"""additive and multiplicative beside keras: weights carried across, and what keras computes otherwise.

keras' `AdditiveAttention` has no projections: its score is `sum_d s_d tanh(q_d + k_d)` with a learned `s`, that is ours with
identities for `W_q` and `W_k` and `v = s`. Its `Attention(score_mode="concat")` is `c sum_d tanh(s (q_d + k_d))` with two learned
numbers, that is ours with `W_a = [s I, s I]` and `v_a = c`. Both order their inputs query, value, key. A row that sees nothing is
the mean of all values there, as keras subtracts 1e9 from hidden scores, and 0 here.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab import create

B, LQ, LK, D = 2, 5, 7, 6
CLOSE = {"atol": 2e-6, "rtol": 2e-5}  # float32 on both sides, sums of a few dozen terms of order 1


@pytest.fixture(scope="module")
def layers() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="keras is not installed: pip install 'attnlab[test]'")
    if keras.backend.backend() != "torch":
        pytest.skip(f"keras runs on {keras.backend.backend()}, and KERAS_BACKEND must be torch")
    return keras.layers


@pytest.fixture
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, D, generator=generator) for n in (LQ, LK, LK)]


def ours(variant: Any, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    found = variant(query[:, None], key[:, None], value[:, None], need_weights=True, **arguments)
    return found.out[:, 0], found.weights[:, 0]


def additive_from(layer: Any) -> Any:
    variant = create("additive", num_heads=1, head_dim=D)
    scale = layer.scale.value if layer.use_scale else torch.ones(D)
    variant.load_state_dict({"W_q": torch.eye(D)[None], "W_k": torch.eye(D)[None], "v": scale[None].detach()})
    return variant


def concat_from(layer: Any) -> Any:
    variant = create("multiplicative", score="concat", num_heads=1, head_dim=D)
    scale = layer.scale.value.detach() if layer.use_scale else torch.ones(())
    one = scale * torch.eye(D)
    weight = layer.concat_score_weight.value.detach()
    variant.load_state_dict({"W_a": torch.cat([one, one], 1)[None], "v_a": weight.expand(1, D)})
    return variant


def made(layers: Any, kind: str, **options: Any) -> tuple[Any, Any]:
    """A keras layer with weights that are not its first ones, and our variant with the same."""
    if kind == "additive":
        layer = layers.AdditiveAttention(**options)
    else:
        layer = layers.Attention(score_mode="concat", **options)
    layer.build([(B, LQ, D), (B, LK, D), (B, LK, D)])
    generator = torch.Generator().manual_seed(1)
    for weight in layer.weights:
        weight.assign(torch.rand(tuple(weight.shape), generator=generator) + 0.5)
    return layer, additive_from(layer) if kind == "additive" else concat_from(layer)


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("kind", ["additive", "concat"])
@pytest.mark.parametrize("rules", ["nothing", "key mask", "causal"])
def test_outputs_and_weights_agree(layers: Any, inputs: list[Tensor], kind: str, use_scale: bool, rules: str) -> None:
    layer, variant = made(layers, kind, use_scale=use_scale)
    query, key, value = inputs
    theirs: dict[str, Any] = {}
    mine: dict[str, Any] = {}
    if rules == "key mask":
        present = torch.tensor([[True] * LK, [True] * 3 + [False] * 4])
        theirs, mine = {"mask": [None, present]}, {"key_mask": present}
    if rules == "causal":  # the diagonal of keras starts in the upper left corner
        theirs, mine = {"use_causal_mask": True}, {"causal": True, "offset": "top_left"}
    out, weights = layer([query, value, key], return_attention_scores=True, **theirs)
    got, got_weights = ours(variant, query, key, value, **mine)
    torch.testing.assert_close(got, out, **CLOSE)
    torch.testing.assert_close(got_weights, weights, **CLOSE)


@pytest.mark.parametrize("kind", ["additive", "concat"])
def test_gradients_of_the_inputs_agree(layers: Any, inputs: list[Tensor], kind: str) -> None:
    layer, variant = made(layers, kind, use_scale=True)
    found = []
    for run in (lambda q, k, v: layer([q, v, k]), lambda q, k, v: ours(variant, q, k, v)[0]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("kind", ["additive", "concat"])
def test_a_row_that_sees_nothing_is_a_mean_there_and_zero_here(layers: Any, inputs: list[Tensor], kind: str) -> None:
    layer, variant = made(layers, kind, use_scale=True)
    query, key, value = inputs
    present = torch.tensor([[True] * LK, [False] * LK])
    out = layer([query, value, key], mask=[None, present])
    # In float32 a score of order 1 is lost beside 1e9, so that all weights are alike.
    torch.testing.assert_close(out[1], value[1].mean(0).expand(LQ, D), **CLOSE)
    assert not ours(variant, query, key, value, key_mask=present)[0][1].any()
