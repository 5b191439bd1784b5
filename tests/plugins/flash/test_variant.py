"""What `flash` promises where: by kernels, by torch's kernel, and which of them serves a call."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from attnlab import Request, UnsupportedRequest
from attnlab.engines import kernels_can_run, kernels_serve
from attnlab_plugins.flash.variant import _BY_KERNELS, FlashAttention

WITHOUT_KERNELS = pytest.mark.skipif(
    kernels_can_run(), reason="this process has a GPU or an interpreter that the kernels serve"
)


@WITHOUT_KERNELS
def test_without_a_device_for_the_kernels_their_features_are_refused_with_the_reason() -> None:
    flash = FlashAttention(num_heads=1, head_dim=8)
    assert not set(_BY_KERNELS) & set(flash.capabilities.declared())
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(UnsupportedRequest, match="its Triton kernels alone do this, on an NVIDIA GPU"):
        flash(x, x, x, window=(1, 0))


def test_with_kernels_on_cuda_a_request_is_judged_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab_plugins.flash import variant

    monkeypatch.setattr(variant, "kernels_serve", lambda device: device == "cuda")
    monkeypatch.setattr(variant, "kernels_can_run", lambda: True)
    flash = FlashAttention(num_heads=1, head_dim=64)

    def refused(*features: str, **facts: Any) -> list[str]:
        return [r.feature for r in flash.supports(Request.of(*features, query_length=8, **facts))]

    assert refused("window", "bias", "dropout", "lse", "mask", dtype="float32", device="cuda") == []
    assert refused("window", "softcap", dtype="float32", device="cpu") == ["window", "softcap"]
    assert refused(dtype="float64", device="cpu") == []
    assert refused(dtype="float64", device="cuda") == ["dtype"]
    assert refused(head_dim=257, device="cuda") == ["width", "width"]
    assert refused(key_length=1 << 30, device="cuda") == ["length"]
    assert refused("weights", "score_mod", "mask_mod", device="cuda") == ["mask_mod", "score_mod", "weights"]


def test_what_an_instance_claims_on_a_device_lies_within_its_class() -> None:
    flash = FlashAttention(num_heads=1, head_dim=8)
    for device in ("cpu", "cuda"):
        assert not flash.capabilities_on(device).within(FlashAttention.capabilities)


@pytest.mark.parametrize(
    "asked",
    [{"need_weights": True}, {"score_mod": lambda s, b, h, q, k: s}, {"mask_mod": lambda b, h, q, k: q >= k}],
    ids=lambda a: next(iter(a)),
)
def test_the_kernels_refuse_what_they_do_not_do(make: Any, asked: dict[str, Any]) -> None:
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(UnsupportedRequest, match=f"flash does not support {next(iter(asked))}="):
        make(num_heads=1, head_dim=8)(x, x, x, **asked)


def test_float64_and_heads_wider_than_256_are_refused_by_the_kernels(make: Any) -> None:
    x = torch.randn(1, 1, 3, 257)
    with pytest.raises(UnsupportedRequest, match=r"d_k=257 \(allowed: 1 to 256\)"):
        make(num_heads=1, head_dim=257)(x, x, x)
    y = x[..., :8].double()
    with pytest.raises(UnsupportedRequest, match="dtype float64"):
        make(num_heads=1, head_dim=8)(y, y, y)


def test_the_interpreters_switch_alone_sends_cpu_tensors_through_the_kernels(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 1, 5, 8)
    flash = make(num_heads=1, head_dim=8)
    by_kernels = flash(x, x, x, need_lse=True)
    monkeypatch.delenv("TRITON_INTERPRET")
    by_torch = FlashAttention(num_heads=1, head_dim=8)(x, x, x)
    torch.testing.assert_close(by_kernels.out, by_torch.out)
    assert not kernels_serve("cpu")


def test_listing_making_and_calling_on_the_cpu_import_no_triton() -> None:
    code = (
        "import sys, torch, attnlab\n"
        "attnlab.names(); attnlab.info('flash')\n"
        "x = torch.randn(1, 1, 3, 8, requires_grad=True)\n"
        "attnlab.attend(x, x, x, 'flash', causal=True).out.sum().backward()\n"
        "print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("setting", "wanted"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")])
def test_float32_products_follow_torchs_own_setting(interpreter: None, setting: str, wanted: str) -> None:
    from attnlab_plugins.flash.launch import precision

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        assert precision(torch.float32) == wanted
        assert precision(torch.bfloat16) == "tf32"  # means nothing there
    finally:
        torch.set_float32_matmul_precision(before)
