"""The function that transformers calls in an attention layer, and what its arguments mean in attnlab's words. Needs torch.

CONTRACT section 7 is the law: a tensor mask is complete, None is causal exactly in a causal module, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnlab._remembered import Shortcuts
from attnlab.call import AttentionOutput, call_signature
from attnlab.capabilities import Capabilities
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._torch_masks import bias_of
from attnlab.integrations._transformers_masks import asked_of, is_additive, rule_of
from attnlab.interface import Attention
from attnlab.mask import AttentionMask

_recording: Any
try:
    from transformers.utils.output_capturing import _active_collector as _recording
except ImportError:  # where that library keeps it elsewhere, models hand `output_attentions` on
    _recording = None

_CONSUMED = {"softcap": "softcap", "s_aux": "sinks", "position_bias": "bias"}  # theirs: ours
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


_CAUSAL: Mapping[str, Any] = {"causal": True}
_NOTHING: Mapping[str, Any] = {}
_SAME = 4.5e-16  # two units in the last place of a float: D ** -0.5 and 1 / sqrt(D) may differ by one


class Callee(Protocol):
    """What a layer's call goes to: an `Attention`, or what stands for one."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def shift_invariant(self) -> bool: ...

    def default_scale(self) -> float | None: ...

    @property
    def forward(self) -> Callable[..., AttentionOutput]: ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, **asked: Any) -> AttentionOutput: ...


class Source(Protocol):
    """Who serves a layer."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee: ...


class ModelFunction:
    """The function that transformers calls in each layer; `source` says what serves a layer.

    bare: nobody but this function holds what `source` gives, so that it can have no hooks, and its `forward` is called.
    """

    def __init__(self, source: Source, *, bare: bool = False) -> None:
        self.source, self.bare = source, bare
        self._shortcuts = Shortcuts()

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
        asked, unknown = _extras(kwargs) if kwargs else ({}, [])
        if _weights_are_recorded():
            asked["need_weights"] = True  # refused by the gate where the variant has none
        n_q, n_k = query.shape[2], key.shape[2]
        window = kwargs.get("sliding_window") if attention_mask is None and kwargs else None
        if attention_mask is not None:
            said = asked_of(attention_mask)
        else:
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            causal = is_causal and n_q > 1 and not is_additive(getattr(module, "config", None))
            said = _CAUSAL if causal else _NOTHING
        call, kept, since = None, None, 0
        if self.bare and said is not None and window is None and not (asked or unknown or dropout):
            # The shortcut of small inputs, as `attnlab.attention` has it.
            since = self._shortcuts.generation
            call, kept = _call_of(query, key, value, said, scaling)
            served = self._shortcuts.held.get(call) if call else None
            if served is not None and not torch._C._is_any_autocast_enabled():
                out = served(query, key, value) if kept is None else served(query, key, value, kept)
                return out.transpose(1, 2).contiguous(), None
        attention = self.source(module, query, key, value)
        if unknown:
            raise UnsupportedRequest(
                f"{attention.name}: the model passes {', '.join(sorted(unknown))}, which this adapter does not know "
                "and will not ignore; run this model with its own attention"
            )
        if window is not None and window < n_k:
            raise UnsupportedRequest(
                f"{attention.name}: the model asks for a window of {window} keys and built no mask that holds it; "
                "register the mask function together with the attention function"
            )
        if attention_mask is None and said and n_q != n_k:
            raise UnsupportedRequest(
                f"{attention.name}: a causal layer came without a mask at {n_q} queries and {n_k} keys, "
                "which leaves the alignment open; pass the mask of this implementation"
            )
        _put_mask(attention, asked, attention_mask, said)
        if scaling is not None:
            _put_scale(attention, asked, scaling, key)
        if dropout:
            asked["dropout_p"] = dropout
        if n_q != n_k and isinstance(attention, Attention):
            check_positions(attention, query, key, asked)
        serve = attention.forward if self.bare else attention
        result = serve(query, key, value, **asked)
        if call and "scale" not in asked and isinstance(attention, Attention):
            causal = asked.get("causal", False)
            self._shortcuts.learn(call, attention, query, key, value, causal, kept, since=since)
        return result.out.transpose(1, 2).contiguous(), result.weights  # [B, Lq, Hq, Dv]


def _call_of(
    query: Tensor, key: Tensor, value: Tensor, said: Mapping[str, Any], scaling: float | None
) -> tuple[Any, AttentionMask | None]:
    """What such a call is remembered by, None where it is not, and its mask where that keeps."""
    if torch.compiler.is_compiling() or not (scaling is None or type(scaling) is float):
        return None, None  # a tensor's value may change
    mask = said.get("mask")
    if mask is None:
        return (call_signature("", query, key, value, "causal" in said), scaling), None
    kept = mask.kept
    return (None if kept is None else (call_signature(kept.word, query, key, value, False), scaling)), mask


def _weights_are_recorded() -> bool:
    """Whether transformers collects attention weights in this forward: some models do not hand `output_attentions` on."""
    recorded = None if _recording is None else _recording.get()
    return recorded is not None and any("attentions" in word for word in recorded)


def check_positions(attention: Attention, query: Tensor, key: Tensor, asked: Mapping[str, Any]) -> None:
    """Refuse to guess where queries stand for a variant that reads positions; a mask with structure says it."""
    n_q, n_k = query.shape[2], key.shape[2]
    if n_q == n_k or attention.capabilities.position_free or "offset" in asked:
        return
    mask = asked.get("mask")
    if not isinstance(mask, AttentionMask) or mask.offset is None:
        raise UnsupportedRequest(
            f"{attention.name}: it reads positions, and nothing says where these {n_q} queries stand among {n_k} keys; "
            "install(model, ...) knows it in cross-attention, and in causal layers a mask of this implementation does"
        )


def _extras(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The call's remaining arguments in our words, and those that are not understood."""
    asked: dict[str, Any] = {}
    unknown = []
    for word, value in kwargs.items():
        if value is None or word in _INERT:
            continue
        if word in _CONSUMED:
            asked[_CONSUMED[word]] = value
        elif word == "output_attentions":
            if value:
                asked["need_weights"] = True
        elif word not in _IN_THE_MASK:
            unknown.append(word)
    return asked, unknown


def _put_mask(
    attention: Callee, asked: dict[str, Any], mask: Tensor | None, said: Mapping[str, Any] | None
) -> None:
    """Who sees whom: what is said of it by structure, else a mask that is complete, a tensor where it is bool and else a bias.

    Packed sequences are segments to variants that read where a sequence begins or take no rule for each pair, and a tensor to the rest.
    """
    able = attention.capabilities
    anywhere = able.mask and (able.position_free or attention.shift_invariant)
    if said is not None:
        packed = "mask" in said and said["mask"].segments is not None
        if not packed or (able.segments and not anywhere):
            asked.update(said)
            return
    if not isinstance(mask, Tensor):
        raise InvalidInput(
            f"{attention.name}: attention_mask must be a tensor or None, got {type(mask).__name__}"
        )
    mask = rule_of(mask)
    if mask.dtype != torch.bool:
        bias = bias_of(mask)
        asked["bias"] = bias if "bias" not in asked else asked["bias"] + bias
        return
    if not anywhere:
        lacks = "does not support mask=, a rule for each pair" if not able.mask else "reads positions"
        raise UnsupportedRequest(
            f"{attention.name} {lacks}, and nothing says that the model's mask is causality, "
            "a window or padding: it packs sequences, has a rule of its own, or came into a graph of torch.compile from outside; "
            "compile or export the whole model, and with attention_mask= (ones where nothing is padded), as without one a "
            "traced model has to suppose packed sequences"
        )
    asked["mask"] = mask


def _put_scale(attention: Callee, asked: dict[str, Any], scaling: float, key: Tensor) -> None:
    """Hand the model's scale on. Where the formula has none, only the usual `Dk^-0.5` may be left out.

    Layers always pass a scale; `Dk^-0.5` is what scaled dot product means and says nothing else. A formula
    whose normaliser cancels a scale has no place for it; an unusual one is passed on and refused by the gate.
    """
    own = attention.default_scale()
    if own is not None and abs(scaling - own) <= _SAME * own:
        return
    if not attention.capabilities.scale and abs(scaling - key.shape[3] ** -0.5) <= 1e-6 * scaling:
        return
    asked["scale"] = scaling
