"""The function that transformers calls in an attention layer, and what its arguments mean in attnlab's words. Needs torch.

CONTRACT section 7 is the law: a tensor mask is complete, None is causal exactly in a causal module, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnlab.call import AttentionOutput
from attnlab.capabilities import Capabilities
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._torch_masks import bias_of
from attnlab.integrations._transformers_masks import structure_of
from attnlab.interface import Attention
from attnlab.mask import AttentionMask

_CONSUMED = frozenset({"softcap", "s_aux", "position_bias", "output_attentions"})
_IN_THE_MASK = frozenset({"sliding_window"})
_INERT = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "cache",
        "past_key_values",
        "output_hidden_states",
        "return_dict",
        "num_items_in_batch",
        "output_router_logits",
    }
)


class Callee(Protocol):
    """What a layer's call goes to: an `Attention`, or what stands for one."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def default_scale(self) -> float | None: ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, **asked: Any) -> AttentionOutput: ...


class Source(Protocol):
    """Who serves a layer."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee: ...


class ModelFunction:
    """The function that transformers calls in each layer; `source` says what serves a layer."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`(out [B, Lq, Hq, Dv] contiguous, weights or None)`; every argument means what it means there."""
        attention = self.source(module, query, key, value)
        asked = _extras(attention, kwargs)
        window = kwargs.get("sliding_window")
        if attention_mask is None and window is not None and window < key.shape[2]:
            raise UnsupportedRequest(
                f"{attention.name}: the model asks for a window of {window} keys and built no mask that holds it; "
                "register the mask function together with the attention function"
            )
        asked.update(
            _visibility(attention, module, query, key, attention_mask, is_causal, asked.pop("bias", None))
        )
        if scaling is not None:
            _put_scale(attention, asked, scaling, key.shape[-1])
        if dropout:
            asked["dropout_p"] = dropout
        if isinstance(attention, Attention):
            check_positions(attention, query, key, asked)
        result = attention(query, key, value, **asked)
        return result.out.transpose(1, 2).contiguous(), result.weights  # [B, Lq, Hq, Dv]


def check_positions(attention: Attention, query: Tensor, key: Tensor, asked: Mapping[str, Any]) -> None:
    """Refuse to guess where queries stand for a variant that reads positions; a mask with structure says it."""
    n_q, n_k = query.shape[2], key.shape[2]
    mask = asked.get("mask")
    told = "offset" in asked or (isinstance(mask, AttentionMask) and mask.offset is not None)
    if n_q != n_k and not told and not attention.capabilities.position_free:
        raise UnsupportedRequest(
            f"{attention.name}: it reads positions, and nothing says where these {n_q} queries stand among {n_k} keys; "
            "install(model, ...) knows it in cross-attention, and in causal layers a mask of this implementation does"
        )


def _extras(attention: Callee, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's remaining arguments in our words; `UnsupportedRequest` for one not understood."""
    given = {word: value for word, value in kwargs.items() if value is not None}
    unknown = sorted(set(given) - _CONSUMED - _IN_THE_MASK - _INERT)
    if unknown:
        raise UnsupportedRequest(
            f"{attention.name}: the model passes {', '.join(unknown)}, which this adapter does not know "
            "and will not ignore; run this model with its own attention"
        )
    asked: dict[str, Any] = {}
    for theirs, ours in (("softcap", "softcap"), ("s_aux", "sinks"), ("position_bias", "bias")):
        if theirs in given:
            asked[ours] = given[theirs]
    if given.get("output_attentions"):
        asked["need_weights"] = True  # refused by the gate where the variant has none
    return asked


def _visibility(
    attention: Callee,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool | None,
    bias: Tensor | None,
) -> dict[str, Any]:
    """Who sees whom: a tensor mask is complete; None is causal exactly in a causal module."""
    asked: dict[str, Any] = {}
    if mask is None:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        n_q, n_k = query.shape[2], key.shape[2]
        if causal and n_q > 1:
            if n_q != n_k:
                raise UnsupportedRequest(
                    f"{attention.name}: a causal layer came without a mask at {n_q} queries and {n_k} keys, "
                    "which leaves the alignment open; pass the mask of this implementation"
                )
            asked["causal"] = True
    elif not isinstance(mask, Tensor):
        raise InvalidInput(
            f"{attention.name}: attention_mask must be a tensor or None, got {type(mask).__name__}"
        )
    elif mask.dtype == torch.bool:
        known = structure_of(mask)
        asked["mask"] = mask if known is None else known
        if known is not None and not known.given():
            del asked["mask"]  # nothing is hidden
    else:
        bias = bias_of(mask) if bias is None else bias + bias_of(mask)
    if bias is not None:
        asked["bias"] = bias
    return asked


def _put_scale(attention: Callee, asked: dict[str, Any], scaling: float, key_dim: int) -> None:
    """Hand the model's scale on. Where the formula has none, only the usual `Dk^-0.5` may be left out.

    Layers always pass a scale; `Dk^-0.5` is what scaled dot product means and says nothing else. A formula
    whose normaliser cancels a scale has no place for it; an unusual one is passed on and refused by the gate.
    """
    usual = abs(scaling - key_dim**-0.5) <= 1e-6 * scaling
    if usual and (not attention.capabilities.scale or attention.default_scale() == scaling):
        return
    asked["scale"] = scaling
