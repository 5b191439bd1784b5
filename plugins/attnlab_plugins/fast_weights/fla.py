"""The formulas of `variants`, run by the kernels of the package `flash-linear-attention`. Needs torch; an instance needs fla and triton.

What fla 0.6 takes, and attnlab does not: `[B, L, H, D]`; as many heads of keys as of queries; the memory in float32 and the rest in
bfloat16; even widths of at most 256, as its gradients ask for. It takes float16 too, where products within a chunk overflow, so that
a large token turns the gradients of tokens before it into NaN; float32 it rounds to tf32, or refuses.

No GPU has run this. In Triton's interpreter, on a CPU, these kernels gave what the formulas give, in float32 and float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call, Capabilities, UnsupportedRequest, VariantUnavailable
from attnlab_plugins.fast_weights.variants import (
    DeltaRuleAttention,
    FastWeightsAttention,
    GatedAttention,
    GatedDeltaAttention,
)

# (whether writing corrects, axes of the log-decay or 0) -> both kernels, chunk_* and fused_recurrent_*.
_KERNELS = {
    (False, 0): "simple_gla",
    (False, 3): "simple_gla",
    (False, 4): "gla",
    (True, 0): "delta_rule",
    (True, 3): "gated_delta_rule",
    (True, 4): "kda",
}
FEW = 64
"""Tokens of one chunk of fla's, up to which its own layers go token by token where no gradient is needed."""
# Below e to this nothing is left in float32; fla adds decays up, and takes differences of which -inf has none.
_FADED = -100.0


def _served(own: Capabilities) -> Capabilities:
    return replace(
        own,
        compiles=False,
        exports=False,
        deterministic=False,
        dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        head_dims=range(2, 257, 2),
    )


class _ByFla(FastWeightsAttention):
    """What the four share: `scan` by a kernel of fla's, chunk by chunk, or token by token for few that need no gradient."""

    def __init__(self, **arguments: Any) -> None:
        _ops(self.name)  # raises now rather than at the first call
        super().__init__(**arguments)

    def token_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        # The scale goes to the query: the output would be rounded before it and after.
        scale = self.default_scale() if call.scale is None else call.scale
        assert scale is not None
        unscaled = Call(call.visibility, 1.0, gates=call.gates, state=call.state, recording=call.recording)
        return super().attend(query * scale, key, value, unscaled)

    def scan(
        self,
        memory: Tensor,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        gates: Mapping[str, Tensor],
        present: Tensor | None,
        *,
        recording: bool,
    ) -> tuple[Tensor | None, Tensor]:
        heads, length = key.shape[1:3]
        if not length:
            return (None if query is None else value.new_zeros(*query.shape[:4], self.value_dim)), memory
        key, value, beta, decay = self.without_absent(key, value, gates, present)
        groups = 1 if query is None else query.shape[2]

        def placed(x: Tensor) -> Tensor:  # [B, H, L, ...] -> [B, L, H * groups, ...]
            return x.repeat_interleave(groups, 1).transpose(1, 2).contiguous()

        readers = key if query is None else query.flatten(1, 2)  # without a query: any tensor of that shape
        tensors = [readers.transpose(1, 2).contiguous(), placed(key), placed(value)]
        if decay is not None:
            tensors.append(placed(decay.clamp(min=_FADED)))
        graph = recording or (torch.is_grad_enabled() and memory.requires_grad)
        form = "fused_recurrent" if length <= FEW and not graph else "chunk"
        kernel = _KERNELS[self.corrects, 0 if decay is None else decay.dim()]
        out, last = getattr(_ops(self.name), f"{form}_{kernel}")(
            *tensors,
            **({} if beta is None else {"beta": placed(beta)}),
            scale=1.0,
            initial_state=memory.repeat_interleave(groups, 1),
            output_final_state=True,
        )
        if graph:
            out, last = _FirstDerivatives.apply(self.name, out, last)  # type: ignore[no-untyped-call]
        last = last[:, ::groups]
        if query is None:
            return None, last
        return out.transpose(1, 2).unflatten(1, (heads, groups)), last  # [B, H, G, L, Dv]


def _ops(name: str) -> Any:
    """`fla.ops`, whose kernels take `q, k, v` and, where it fades, the log-decay in that order."""
    try:
        from fla import ops
    except ImportError as error:
        raise VariantUnavailable(
            f"{name}: the package flash-linear-attention cannot be imported: {error}; "
            "try: pip install --upgrade flash-linear-attention"
        ) from error
    return ops


class _FirstDerivatives(torch.autograd.Function):
    """Passes tensors on; a backward of which a graph is kept is refused, as fla's would be missing in it without a word."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedRequest(
                f"{ctx.name}: the kernels of flash-linear-attention have no gradients of gradients (create_graph=True); "
                "the variant of the same formula without fla_ in its name has them"
            )
        return None, *grads


class FlaLinearAttention(_ByFla):
    """`fast_weights` by fla's kernels, on CUDA in bfloat16: `S_t = S_{t-1} + k_t v_t^T`, `o_i = scale q_i^T S`.

    Linear attention without a feature map or a normaliser, which fla's `linear_attn` calls `normalize=False`. Parameter-free.
    """

    name = "fla_linear"
    capabilities = _served(FastWeightsAttention.capabilities)


class FlaDeltaRuleAttention(_ByFla, DeltaRuleAttention):
    """`delta_rule` by fla's kernels, on CUDA in bfloat16; gate `beta`, and unit keys, as there. Parameter-free."""

    name = "fla_delta_rule"
    capabilities = _served(DeltaRuleAttention.capabilities)


class FlaGatedAttention(_ByFla, GatedAttention):
    """`gated` by fla's kernels, on CUDA in bfloat16; option `decay` and gate `log_decay` as there.

    `"channel"` by its `gla`, `"head"` and `"retention"` by its `simple_gla`. Parameter-free.
    """

    name = "fla_gated"
    capabilities = _served(GatedAttention.capabilities)


class FlaGatedDeltaAttention(_ByFla, GatedDeltaAttention):
    """`gated_delta` by fla's kernels, on CUDA in bfloat16; option `decay` and gates `beta` and `log_decay` as there.

    `"head"` by its `gated_delta_rule`, `"channel"` by its `kda`. Parameter-free.
    """

    name = "fla_gated_delta"
    capabilities = _served(GatedDeltaAttention.capabilities)
