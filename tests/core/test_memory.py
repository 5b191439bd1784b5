"""What is never formed: the largest tensor that torch makes during a call is counted, not timed or sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnlab import attend, create
from attnlab.engines import additive_cpu, tiled

B, H, D = 1, 2, 8


class Largest(TorchDispatchMode):
    """The elements of the largest storage among the results of all operations, backward included."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, size)
        return out


def inputs(length: int, grad: bool = False) -> list[Tensor]:
    return [torch.randn(B, H, length, D, requires_grad=grad) for _ in range(3)]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that short inputs already exceed."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 12)
    monkeypatch.setattr(tiled, "PLAIN_ELEMENTS", 1 << 12)
    monkeypatch.setattr(tiled, "SMALLEST_SIDE", 16)
    monkeypatch.setattr(additive_cpu, "BLOCK_ELEMENTS", 1 << 12)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["additive", "multiplicative_concat"])
def test_an_additive_score_never_forms_every_pair_by_its_hidden_size(small_tiles: None, name: str, grad: bool) -> None:
    length, hidden = 64, 16
    variant = create(name, num_heads=H, head_dim=D, hidden_size=hidden)
    with Largest() as made, torch.set_grad_enabled(grad):
        out = variant(*inputs(length, grad)).out
        if grad:
            out.sum().backward()
    assert made.elements <= H * length * length  # what is as large as the scores, not hidden times that


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_a_tiled_score_never_forms_every_pair(small_tiles: None, grad: bool) -> None:
    length = 256
    with Largest() as made, torch.set_grad_enabled(grad):
        out = attend(*inputs(length, grad), softcap=5.0).out
        if grad:
            out.sum().backward()
    assert made.elements < H * length * length / 4


@pytest.mark.parametrize("name", ["linearised", "linearised_exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_grows_with_the_length_alone(name: str, causal: bool) -> None:
    largest = []
    for length in (1024, 4096):
        with Largest() as made:
            out = attend(*inputs(length, True), name, causal=causal).out
            out.sum().backward()
        largest.append(made.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < H * 4096 * 4096 / 50


def test_a_mask_shared_by_heads_is_not_copied_for_each() -> None:
    length, heads = 64, 12
    q, k, v = (torch.randn(2, heads, length, D) for _ in range(3))
    mask = torch.rand(2, 1, length, length) < 0.5
    with Largest() as made:
        attend(q, k, v, mask=mask)
    assert made.elements <= max(q.numel(), mask.numel())


def test_padding_alone_builds_no_mask_of_every_pair() -> None:
    length = 1024
    q, k, v = (torch.randn(2, 1, length, D) for _ in range(3))
    with Largest() as made:
        attend(q, k, v, key_lengths=torch.tensor([length, 7]))
    assert made.elements < 2 * length * length / 16


def test_a_window_scores_only_the_tiles_that_it_touches(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []
    plain = tiled._Job.scores

    def counted(self: Any, q0: int, q1: int, k0: int, k1: int) -> Tensor:
        scored.append((q1 - q0) * (k1 - k0))
        return plain(self, q0, q1, k0, k1)

    monkeypatch.setattr(tiled._Job, "scores", counted)
    length = 512
    with torch.no_grad():
        attend(*inputs(length), window=(15, 0), softcap=5.0)
    assert sum(scored) < length * length / 4


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_mask_or_bias_that_is_expanded_over_items_and_heads_is_never_copied_for_each(kind: str) -> None:
    length, heads = 32, 12
    query, key, value = (torch.randn(3, heads, length, D) for _ in range(3))
    one = torch.rand(1, 1, length, length)
    given = (one < 0.5 if kind == "mask" else one).expand(3, heads, length, length)
    with Largest() as made:
        out = attend(query, key, value, **{kind: given}).out
    assert made.elements <= query.numel()
    torch.testing.assert_close(out, attend(query, key, value, **{kind: given.contiguous()}).out)
