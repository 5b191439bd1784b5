"""Offsets past 2^31 elements: strides that large over memory of which few pages are ever touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    """The interpreter copies whole storages back to their device, here onto themselves; without that, pages stay unmapped."""
    import triton.runtime.interpreter as inside

    if not hasattr(inside.GridExecutor, "_restore_args_dev"):
        pytest.skip("this release of triton copies storages elsewhere; the copy would take the machine's memory")
    monkeypatch.setattr(inside.GridExecutor, "_restore_args_dev", lambda *arguments: None)


def spread(x: Tensor, stride: int) -> Tensor:
    """`x [1, 1, L, D]` with that many elements from row to row."""
    room = torch.empty((x.shape[2] - 1) * stride + x.shape[3], dtype=x.dtype)
    view = room.as_strided(x.shape, (0, 0, stride, 1))
    view.copy_(x)
    return view


@pytest.mark.parametrize("stride", [1 << 21, 1 << 26], ids=["between tiles", "inside a tile"])
def test_rows_far_apart_are_found(untouched: None, make: Any, stride: int) -> None:
    length = (1 << 31) // stride + 20  # the last rows lie past 2^31 elements
    rows = [0, 1, length // 2, length - 2, length - 1] if length > 100 else list(range(length))
    value = torch.zeros(1, 1, length, 16, dtype=torch.float16)
    value[:, :, rows] = torch.randn(1, 1, len(rows), 16).half()
    query = torch.randn(1, 1, 3, 16).half()
    key = torch.randn(1, 1, length, 16).half()
    flash = make(num_heads=1, head_dim=16)
    try:
        far = spread(key, stride)
    except RuntimeError as refusal:
        pytest.skip(f"this machine gives no address space of 4 GiB: {refusal}")
    wanted = flash(query, key, value).out
    assert torch.equal(flash(query, far, value).out, wanted)


def test_a_mask_larger_than_memory_is_read_through_its_strides(make: Any) -> None:
    q, k, v = (torch.randn(1, 4, 20, 16) for _ in range(3))
    allowed = (torch.rand(20, 20) < 0.6) | torch.eye(20).bool()
    flash = make(num_heads=4, head_dim=16)
    expanded = allowed.expand(1, 4, 20, 20)
    assert torch.equal(flash(q, k, v, mask=expanded).out, flash(q, k, v, mask=expanded.contiguous()).out)


def test_large_strides_choose_64_bit_offsets_and_usual_ones_do_not(interpreter: None) -> None:
    from attnlab_plugins.flash.launch import wide

    x = torch.empty(1, device="meta")
    assert wide(x.as_strided((1, 1, 2, 8), (0, 0, 1 << 22, 1)))
    assert wide(None, x.as_strided((1, 1, 2, 8), (0, 0, 8, 1 << 22)))
    assert not wide(x.as_strided((1, 1, 2, 8), (0, 0, 3 * 64 * 128, 1)))


@pytest.mark.full
def test_many_short_items_are_each_their_own(make: Any) -> None:
    q, k, v = (torch.randn(3000, 1, 3, 16).requires_grad_() for _ in range(3))
    out = make(num_heads=1, head_dim=16)(q, k, v).out
    found = torch.autograd.grad(out.sum(), (q, k, v))
    a, b, c = (x.detach()[2990:].requires_grad_() for x in (q, k, v))
    last = (a @ b.transpose(-1, -2) * 0.25).softmax(-1) @ c
    torch.testing.assert_close(out[2990:], last)
    for got, wanted in zip(found, torch.autograd.grad(last.sum(), (a, b, c)), strict=True):
        torch.testing.assert_close(got[2990:], wanted)
