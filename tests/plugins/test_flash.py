"""flash serves by torch's flash kernel or refuses, naming who would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnlab
from attnlab import InvalidInput, UnsupportedRequest, attend, create
from attnlab.engines import fused


class Names(TorchDispatchMode):
    """The operations that torch was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True},
        {"scale": 0.3},
        {"mask": torch.rand(5, 5) < 0.8},
        {"key_mask": torch.tensor([[True, True, False, True, False]])},
    ],
    ids=["plain", "causal", "scale", "mask", "key_mask"],
)
def test_the_flash_kernel_and_no_other_does_the_work(dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 5, 8).to(dtype)
    with Names() as torch_was:
        attend(x, x, x, "flash", **arguments)
    assert any("flash_attention" in name for name in torch_was.seen), torch_was.seen
    assert not any("softmax" in name or "bmm" in name for name in torch_was.seen), torch_was.seen


@pytest.mark.parametrize(
    "asked",
    [
        {"need_weights": True},
        {"need_lse": True},
        {"bias": torch.zeros(1, 1, 3, 3)},
        {"dropout_p": 0.1},
        {"softcap": 1.0},
        {"sinks": torch.zeros(1)},
        {"window": (1, 0)},
    ],
    ids=lambda a: next(iter(a)),
)
def test_what_the_kernel_has_not_is_refused_and_dot_product_named(asked: dict[str, Any]) -> None:
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(UnsupportedRequest, match=r"that declare it: .*dot_product"):
        attend(x, x, x, "flash", **asked)


def test_a_kernel_that_will_not_serve_is_a_refusal_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(fused, "scaled_dot_product_attention", none)
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(UnsupportedRequest, match=r"torch's flash kernel takes no such call.*dot_product serves"):
        create("flash", num_heads=1, head_dim=8)(x, x, x)


def test_any_other_fault_of_torch_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(fused, "scaled_dot_product_attention", full)
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        create("flash", num_heads=1, head_dim=8)(x, x, x)


def test_a_mask_too_large_to_build_is_refused_and_tiles_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MASK_ELEMENTS", 8)
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(InvalidInput, match="4 queries and 4 keys is too large to build; dot_product"):
        attend(x, x, x, "flash", causal=True, offset=-1)


@pytest.mark.parametrize("width", [3, 40, 72, 80, 96])
def test_the_scale_is_that_of_the_width_given_not_of_a_padded_one(width: int) -> None:
    q, k, v = (torch.randn(1, 1, 6, width, dtype=torch.float64) for _ in range(3))
    padded = [torch.nn.functional.pad(t, (0, 128 - width)) for t in (q, k, v)]
    wide = attend(*padded, variant="flash", scale=width**-0.5).out[..., :width]
    # float64: sums of at most 96 terms of order 1.
    torch.testing.assert_close(attend(q, k, v, "flash").out, wide, atol=1e-12, rtol=1e-11)


def test_a_causal_mask_with_padding_too_large_to_build_is_refused_by_its_request() -> None:
    request = attnlab.Request.of("causal", "key_mask", query_length=5000)
    reasons = attnlab.create("flash", num_heads=1, head_dim=64).supports(request)
    assert [r.feature for r in reasons] == ["causal+mask"]
    x = torch.zeros(1, 1, 5000, 4)
    with pytest.raises(attnlab.UnsupportedRequest, match="too large"):
        attnlab.attention(x, x, x, "flash", causal=True, key_lengths=torch.tensor([4000]))


def test_on_cuda_only_half_precision_without_masks_is_said_to_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without triton, that is: with it kernels of its own serve the rest."""
    monkeypatch.setattr("attnlab_plugins.flash.variant.kernels_serve", lambda device: False)
    flash = attnlab.create("flash", num_heads=1, head_dim=64)
    asked = {"query_length": 8, "device": "cuda"}
    assert flash.supports(attnlab.Request.of("causal", dtype="bfloat16", **asked)) == []
    assert [r.feature for r in flash.supports(attnlab.Request.of("mask", dtype="float32", **asked))] == [
        "dtype",
        "mask",
    ]
