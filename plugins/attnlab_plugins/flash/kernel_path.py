"""One call by the kernels. Needs torch and triton; imported by the variant when a request goes this way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab_plugins.flash.function import FlashFunction
from attnlab_plugins.flash.rules import rules_of


def kernel_attention(query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float) -> AttentionOutput:
    """`out` and, where the call needs it, `lse`, by the Triton kernels; the request was validated before."""
    seeds = None
    if call.dropout_p:
        # Drawn where query lives, so that torch's generator decides, nothing waits for the device and graphs replay it.
        seeds = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    low, high, *rules = rules_of(call.visibility)
    tensors = (query, key, value, _narrowed(call.bias), _narrowed(call.sinks), seeds, *rules)
    numbers = (low, high, float(scale), call.softcap, float(call.dropout_p))
    run: Any = FlashFunction.apply if call.recording else FlashFunction.forward
    if torch.compiler.is_compiling():
        run = torch.ops.attnlab.flash_forward
    out, lse = run(*tensors, *numbers)
    return AttentionOutput(out, lse=lse if call.need_lse else None)


def _narrowed(x: Tensor | None) -> Tensor | None:
    """float64 biases and sinks as float32, in which the kernels add them; what is finite stays finite, as only -inf hides."""
    if x is None or x.dtype != torch.float64:
        return x
    limit = torch.finfo(torch.float32)
    return torch.where(x.isinf(), x, x.clamp(limit.min, limit.max)).float()
