"""timm's `Attention`, the one of its vision transformers, with any registered variant inside: same call, modules and state dict.

    from attnlab.integrations.timm import TimmAttention
    block.attn = TimmAttention(block.attn, variant="dot_product")

`attnlab.replace` does this to a whole model. Needs torch; timm itself is not imported. Where it differs from timm's own:

- A query that sees no key gets zeros before the output projection; timm gives NaN.
- A mask that is bool says True = may attend, a float one is added, as there; a float one wants a variant that takes a bias.
- What the variant does not declare raises `UnsupportedRequest`; `attn_mask` and `is_causal` together are an `InvalidInput`.
- timm's fused and plain paths are one here, and `set_fused_attn` changes nothing.
- A variant with parameters, buffers or gates of its own adds keys below `attention.` and `gates.` to the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.engines import unit_length
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._torch_masks import bias_of
from attnlab.interface import Attention
from attnlab.layers.arguments import placement, variant_of
from attnlab.layers.multi_head import GateProjections

__all__ = ["TimmAttention", "reason_against"]

_NAME = "TimmAttention"
# Where releases of timm from 0.9 on define the one class.
_CLASSES = frozenset({"timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"})
_NEEDED = ("qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop")
_OPTIONAL = ("norm", "gate")  # newer releases have them


def reason_against(module: nn.Module) -> str | None:
    """Why `module` cannot be taken over, as the end of a sentence about it; None where it can."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
    if kinds[0] not in _CLASSES:
        if _CLASSES.intersection(kinds):
            return f"{kinds[0]} is a subclass of timm's Attention and may compute something of its own"
        return f"no adapter knows what {kinds[0]} computes"
    missing = [name for name in _NEEDED if name not in module._modules]
    missing += [name for name in ("num_heads", "head_dim", "scale") if not hasattr(module, name)]
    if missing:
        return f"it lacks {', '.join(missing)}, which timm's Attention has"
    held = [n for d in (module._modules, module._parameters, module._buffers) for n, x in d.items() if x is not None]
    strange = [name for name in held if name not in (*_NEEDED, *_OPTIONAL)]
    if strange:
        return f"it holds {', '.join(strange)} beside what timm's Attention has"
    scale, usual = float(module.scale), float(module.head_dim) ** -0.5  # type: ignore[arg-type]
    if abs(scale - usual) > 1e-6 * usual:
        return f"its scale is {scale} and not head_dim ** -0.5, which timm's two paths treat differently"
    return None


class TimmAttention(nn.Module):
    """Self-attention of `[B, L, E]` by a variant between the projections, norms and dropouts of timm's `Attention`.

    Args: module, timm's, whose very submodules this one holds, so that its parameters stay the same objects (hooks on it itself
    are not kept); variant a registered name, a config such as `{"name": "sliding_window", "left": 255}`, or an `Attention`; options of
    the variant, which go with a name. Queries and keys are made to unit length where the variant asks for it, and gates that it
    declares are projected from the input. Raises what `attnlab.create` raises, `InvalidInput` for another kind of module, and
    `UnsupportedRequest` where it drops weights and the variant cannot.
    """

    qkv: Any
    q_norm: Any
    k_norm: Any
    attn_drop: Any
    norm: Any
    gate: Any
    proj: Any
    proj_drop: Any

    def __init__(
        self, module: nn.Module, variant: str | Mapping[str, Any] | Attention = "dot_product", **options: Any
    ) -> None:
        super().__init__()
        against = reason_against(module)
        if against:
            raise InvalidInput(f"{_NAME}: module must be timm's Attention: {against}")
        theirs: Any = module
        self.num_heads, self.head_dim = int(theirs.num_heads), int(theirs.head_dim)
        attention = variant_of(
            _NAME,
            variant,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_kv_heads=options.pop("num_kv_heads", None),
            options=options,
        )
        sizes = (attention.num_kv_heads, attention.head_dim, attention.key_dim, attention.value_dim)
        if sizes != (self.num_heads, self.head_dim, self.head_dim, self.head_dim):
            raise InvalidInput(
                f"{_NAME}: the variant must have {self.num_heads} key/value heads and width {self.head_dim} in query, key and "
                f"value, as timm's module has, got {sizes[0]} and widths {sizes[1:]}"
            )
        self.norm = self.gate = None
        for (
            name,
            held,
        ) in module._modules.items():  # in its order, which is that of the parameters and of the state dict
            setattr(self, name, held)
        if self._dropout and not attention.capabilities.dropout:
            raise UnsupportedRequest(f"{_NAME}: {attention.name} declares no dropout of weights; set attn_drop.p = 0")
        device, dtype = placement(self.qkv, module)
        # A packed weight does not tell its width, and not every wrapper says it; the usual one is that of all heads.
        width = int(getattr(self.qkv, "in_features", self.num_heads * self.head_dim))
        self.attention = attention.to(device, dtype)
        self.gates = GateProjections(attention, width).to(device, dtype)
        self.training = module.training
        for own in (self.attention, self.gates):
            own.train(module.training)

    @property
    def _dropout(self) -> float:
        return float(getattr(self.attn_drop, "p", 0.0))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """`[B, L, E]` from `x [B, L, E]`, as timm's module does.

        attn_mask `[L, L]` or broadcastable to `[B, H, L, L]`: bool, True = may attend, or floats that are added to the scores.
        is_causal: query i sees the keys up to i.
        """
        arguments: dict[str, Any] = {}
        if is_causal:
            if attn_mask is not None:
                raise InvalidInput(f"{_NAME}: attn_mask and is_causal both say who sees whom; pass one of them")
            arguments["causal"] = True
        elif attn_mask is not None:
            arguments.update({"mask": attn_mask} if attn_mask.dtype == torch.bool else {"bias": _four_axes(attn_mask)})
        if self.training and self._dropout:
            arguments["dropout_p"] = self._dropout
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, L, 3, H, D]
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, L, D]
        query, key = self.q_norm(query), self.k_norm(key)
        if self.attention.qk_l2norm:
            query, key = unit_length(query), unit_length(key)
        if self.gates:
            arguments["gates"] = self.gates(x)
        out = self.attention(query, key, value, **arguments).out.transpose(1, 2).flatten(2)  # [B, L, H * D]
        if self.norm is not None:
            out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        result: Tensor = self.proj_drop(self.proj(out))
        return result


def _four_axes(mask: Tensor) -> Tensor:
    """A float mask `[L, L]` or of four axes as a bias; other shapes are left to the gate, which names them."""
    return bias_of(mask[None, None] if mask.dim() == 2 else mask)
