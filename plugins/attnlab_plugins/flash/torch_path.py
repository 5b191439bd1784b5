"""One call by torch's own flash kernel, where the Triton kernels do not serve the device. Needs torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlab import AttentionOutput, Call, InvalidInput, Reason, Request, UnsupportedRequest
from attnlab.engines import MASK_ELEMENTS, fused_attention


def torch_reasons(request: Request) -> list[Reason]:
    """What torch's kernel refuses beyond what is undeclared on that device."""
    reasons = []
    masked = request.asks("mask") or request.asks("key_mask")
    if request.device == "cuda":
        if request.dtype not in ("float16", "bfloat16"):
            reasons.append(Reason("dtype", f"dtype {request.dtype} on cuda", "float16, bfloat16"))
        if masked:
            reasons.append(Reason("mask", "a mask on cuda", "no", "torch's flash kernel takes none there"))
    rows = request.batch if request.asks("key_mask") else 1
    if request.asks("causal") and masked and rows * request.query_length * request.key_length > MASK_ELEMENTS:
        size = f"causal=True with a mask over {request.query_length} queries and {request.key_length} keys"
        reasons.append(Reason("causal+mask", size, "less", "both must be built as one mask, which is too large"))
    return reasons


def torch_attention(name: str, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
    """`out` by torch's flash kernel or not at all; `name` opens the messages of refusals."""
    try:
        with _only_flash(query):
            out = fused_attention(query, key, value, call, call.scale)
    except RuntimeError as fault:
        if "No available kernel" not in str(fault):
            raise
        raise UnsupportedRequest(
            f"{name}: torch's flash kernel takes no such call on {query.device.type} "
            f"({query.dtype}, {list(query.shape)}); dot_product serves the same formula"
        ) from fault
    if out is None:
        raise InvalidInput(
            f"{name}: the mask of {query.shape[2]} queries and {key.shape[2]} keys is too large to build; "
            "dot_product serves the same formula by tiles"
        )
    return AttentionOutput(out)


def _only_flash(query: Tensor) -> AbstractContextManager[None]:
    """Where torch's function takes the flash kernel or nothing.

    That choice is one switch for the whole process: calls in other threads meet it, and two that overlap leave it turned. So it
    is not touched on the CPU, where torch takes flash first and every request that validation accepts fits it.
    """
    if query.device.type == "cpu" and not torch.compiler.is_compiling() and flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
