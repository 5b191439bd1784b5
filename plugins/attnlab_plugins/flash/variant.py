"""Flash attention: exact softmax attention that never forms the weights [Dao et al. 2022; Dao 2023]. Needs torch.

Own Triton kernels on CUDA; torch's flash kernel on CPU and wherever triton is missing. triton is imported by the first call
that goes through the kernels, never by listing or by a call on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnlab import Attention, AttentionOutput, Call, Capabilities, Reason, Request
from attnlab.engines import kernels_can_run, kernels_serve
from attnlab_plugins.flash.torch_path import torch_attention, torch_reasons

WIDEST = 256
"""The widest head whose tiles fit the registers of every GPU that the kernels serve."""
LONGEST = (1 << 30) - 1
"""Tokens: positions and sums of two of them are 32-bit in the kernels."""
_TORCH = Capabilities(
    causal=True,
    key_mask=True,
    mask=True,
    scale=True,
    cross_lengths=True,
    gqa=True,
    backward=True,
    dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
    devices=frozenset({"cpu", "cuda"}),
    exact=True,
    normalised=True,
    position_free=True,
    linear_in_value=True,
    compiles=True,
    exports=True,
)
_BY_KERNELS = (
    "window",
    "segments",
    "bias",
    "softcap",
    "sinks",
    "value_dim",
    "dropout",
    "lse",
    "deterministic",
    "linear_memory",
)
_WHY = "its Triton kernels alone do this, on an NVIDIA GPU with triton installed"


class FlashAttention(Attention):
    """`softmax(q k^T / sqrt(Dk)) v` by tiles and online softmax, Dao et al. 2022, "FlashAttention", algorithm 1.

    On CUDA by its own kernels, forward and backward, in memory that grows with the length alone, the same bits each time:
    float32, bfloat16 and float16, widths up to 256, float32 sums; float32 products are exact unless torch's setting allows tf32.
    Without them by torch's own flash kernel, and nothing else: on CPU every float dtype and a key or pair mask, on CUDA half
    precision without masks. What neither does is refused: weights, score_mod and mask_mod always; `dot_product` serves the
    same formula with all of them. Parameter-free.
    """

    name = "flash"
    formula = "softmax_dot_product"
    capabilities = replace(_TORCH, **dict.fromkeys(_BY_KERNELS, True))  # type: ignore[arg-type] # bool fields by name

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        if not kernels_can_run():
            self.narrow(**dict.fromkeys(_BY_KERNELS, _WHY))
        elif kernels_serve("cpu"):
            self.capabilities = self.capabilities_on("cpu")
            self.narrow()  # nothing more: validation reads the capabilities anew

    def capabilities_on(self, device: str) -> Capabilities:
        """The capabilities on this kind of device in this process: of kernels where they serve it, else of torch."""
        have = type(self).capabilities
        if kernels_serve(device):
            return replace(have, dtypes=have.dtypes - {"float64"})
        return have.narrow(**dict.fromkeys(_BY_KERNELS, _WHY))

    def supports(self, request: Request) -> list[Reason]:
        reasons = super().supports(request)
        have = self.capabilities_on(request.device)
        for name in _BY_KERNELS:
            if getattr(self.capabilities, name) and not getattr(have, name) and _asks(request, name):
                reasons.append(Reason(name, f"{name} on {request.device}", "no", _WHY))
        if not kernels_serve(request.device):
            return reasons + torch_reasons(request)
        if request.dtype not in have.dtypes and request.dtype in self.capabilities.dtypes:
            reasons.append(Reason("dtype", f"dtype {request.dtype} on {request.device}", "float32, bfloat16, float16"))
        for word, size in (("d_k", request.key_dim), ("d_v", request.value_dim)):
            if size > WIDEST:
                reasons.append(Reason("width", f"{word}={size}", f"1 to {WIDEST}"))
        if max(request.query_length, request.key_length) > LONGEST:
            reasons.append(Reason("length", "2^30 tokens or more", "fewer"))
        return reasons

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        if not kernels_serve(query.device.type):
            return torch_attention(self.name, query, key, value, call)
        from attnlab_plugins.flash.kernel_path import kernel_attention

        scale = self.default_scale() if call.scale is None else call.scale
        assert scale is not None
        return kernel_attention(query, key, value, call, scale)


def _asks(request: Request, name: str) -> bool:
    return name not in ("deterministic", "linear_memory") and request.asks(name)
