"""attnlab's variants as attention implementations of Hugging Face transformers.

    from attnlab.integrations import transformers as hf
    hf.register()
    model.set_attn_implementation(hf.name("dot_product"))

Needs transformers 5 or later (`pip install "attnlab[transformers]"`); imported only when asked for.
Layout inside: query `[B, Hq, Lq, D]`, key and value `[B, Hkv, Lk, D]` un-repeated; out `[B, Lq, Hq, Dv]`.

A variant that holds parameters cannot be a bare function there: `using(model, {layer_idx: instance})`
puts one instance into each layer for the length of a `with` block.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnlab.catalogue import create, info, names
from attnlab.errors import AttnlabError, InvalidInput, PluginError, UnsupportedRequest, VariantUnavailable
from attnlab.integrations._torch_masks import bias_of
from attnlab.integrations._transformers_masks import make_mask, structure_of
from attnlab.interface import Attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as missing:
    raise VariantUnavailable(
        f"attnlab.integrations.transformers needs transformers 5 or later, and importing it failed: "
        f"{missing}; install it with: pip install 'attnlab[transformers]'"
    ) from missing

__all__ = ["Swap", "name", "register", "unregister", "using"]

# These words in a name select other code paths inside transformers.
_TAKEN_THERE = ("flash", "sdpa", "flex_attention", "/", "|")
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
    }
)

_registered: dict[str, str] = {}  # implementation name -> variant
_instances: dict[tuple[Any, ...], Attention] = {}
_numbers = itertools.count()


class _Caller(Protocol):
    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention: ...


def name(variant: str) -> str:
    """The name under which `variant` is registered there: its row's `hf_name`, else `attnlab_<name>`.

    `UnknownVariant` where it is not registered here, `PluginError` where the name means something else there.
    """
    found = info(variant).hf_name or f"attnlab_{variant}"
    taken = [word for word in _TAKEN_THERE if word in found]
    if taken or not re.fullmatch(r"[A-Za-z0-9_.\-]+", found):
        raise PluginError(
            f"{variant}: its name in transformers must hold letters, digits, '_', '-' or '.' and none of "
            f"{', '.join(map(repr, _TAKEN_THERE))}, which mean something else there; got {found!r}: give the "
            "registry row a usable hf_name"
        )
    return found


def register(variants: Sequence[str] | None = None) -> dict[str, str]:
    """Make variants known to transformers, attention and mask function together; all of them by default.

    Returns variant -> implementation name. With None, rows that cannot be named there or whose requirements
    are missing are left out; a name asked for raises instead. Registering twice changes nothing.
    """
    wanted = names() if variants is None else list(variants)
    done: dict[str, str] = {}
    for variant in wanted:
        try:
            implementation = name(variant)
            unavailable = info(variant).unavailable
            if unavailable:
                raise VariantUnavailable(f"{variant}: {unavailable}")
        except (PluginError, VariantUnavailable):
            if variants is not None:
                raise
            continue
        _put(implementation, _Function(_by_name(variant)))
        _registered[implementation] = variant
        done[variant] = implementation
    return done


def unregister() -> None:
    """Take back everything that `register` put there, and forget the instances made for it."""
    for implementation in list(_registered):
        _take(implementation)
    _registered.clear()
    _instances.clear()


class Swap:
    """What `using` yields: how often each layer called the variant. `verify()` proves that all did."""

    def __init__(self, variant: str, layers: frozenset[int]) -> None:
        self.variant = variant
        self.layers = layers
        self.calls: Counter[int] = Counter()

    def verify(self) -> None:
        """Raise `AttnlabError` unless every attention layer of the model has called the variant."""
        silent = sorted(self.layers - set(self.calls))
        if silent or not self.calls:
            raise AttnlabError(
                f"{self.variant}: expected a call from each of the layers {sorted(self.layers)}, got none "
                f"from {silent or 'any'}; the model was not run inside the block, or does not dispatch its "
                "attention"
            )


@contextmanager
def using(model: Any, variant: str | Mapping[int, Attention]) -> Iterator[Swap]:
    """Run `model` with `variant` in every attention layer, and put back what was there.

    `variant` is a registered name, or a mapping from each layer's `layer_idx` to its own `Attention`, which
    learned variants need. Leaving the block without an error verifies that each layer called it.
    Raises `InvalidInput` for a mapping that does not fit the layers, `AttnlabError` from `Swap.verify`.
    """
    layers = _layers(model)
    if isinstance(variant, str):
        title, source = variant, _by_name(variant)
    else:
        if set(variant) != layers:
            raise InvalidInput(
                f"using: expected one instance for each of the layers {sorted(layers)}, got {sorted(variant)}"
            )
        kinds = {instance.name for instance in variant.values()}
        title, source = ", ".join(sorted(kinds)), _by_layer(dict(variant))
    swap = Swap(title, layers)
    implementation = f"attnlab_swap_{next(_numbers)}"
    before = model.config._attn_implementation
    _put(implementation, _Function(source, swap.calls))
    try:
        model.set_attn_implementation(implementation)
        if model.config._attn_implementation != implementation:
            raise AttnlabError(
                f"{type(model).__name__} does not let its attention be set; it keeps {before!r}"
            )
        yield swap
        swap.verify()
    finally:
        model.set_attn_implementation(before)
        _take(implementation)


class _Function:
    """The function that transformers calls in each layer; it counts its calls where asked."""

    def __init__(self, source: _Caller, calls: Counter[int] | None = None) -> None:
        self.source = source
        self.calls = calls

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
        result = attention(query, key, value, **asked)
        if self.calls is not None:
            self.calls[int(getattr(module, "layer_idx", 0) or 0)] += 1
        return result.out.transpose(1, 2).contiguous(), result.weights  # [B, Lq, Hq, Dv]


def _extras(attention: Attention, kwargs: Mapping[str, Any]) -> dict[str, Any]:
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
    attention: Attention,
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


def _put_scale(attention: Attention, asked: dict[str, Any], scaling: float, key_dim: int) -> None:
    """Hand the model's scale on. Where the formula has none, only the usual `Dk^-0.5` may be left out.

    Layers always pass a scale; `Dk^-0.5` is what scaled dot product means and says nothing else. A formula
    whose normaliser cancels a scale has no place for it; an unusual one is passed on and refused by the gate.
    """
    usual = abs(scaling - key_dim**-0.5) <= 1e-6 * scaling
    if usual and (not attention.capabilities.scale or attention.default_scale() == scaling):
        return
    asked["scale"] = scaling


def _by_name(variant: str) -> _Caller:
    """Instances of a parameter-free variant, made on first use for each set of sizes."""

    def find(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention:
        sizes = (variant, query.shape[1], key.shape[1], query.shape[3], key.shape[3], value.shape[3])
        instance = _instances.get(sizes)
        if instance is None:
            instance = create(
                variant,
                num_heads=sizes[1],
                num_kv_heads=sizes[2],
                head_dim=sizes[3],
                key_dim=sizes[4],
                value_dim=sizes[5],
            )
            if not instance.parameter_free:
                raise InvalidInput(
                    f"{variant}: it holds parameters of its own, so one function cannot serve every layer; "
                    "use using(model, {layer_idx: attnlab.create(...), ...})"
                )
            _instances[sizes] = instance
        return instance

    return find


def _by_layer(instances: dict[int, Attention]) -> _Caller:
    def find(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention:
        return instances[int(module.layer_idx)]  # type: ignore[arg-type]

    return find


def _layers(model: Any) -> frozenset[int]:
    """The `layer_idx` of every module that is an attention layer by its class name."""
    found = frozenset(
        int(module.layer_idx)
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention" in type(module).__name__.lower()
    )
    if not found:
        raise InvalidInput(f"using: {type(model).__name__} has no attention module with a layer_idx")
    return found


def _put(implementation: str, function: _Function) -> None:
    AttentionInterface.register(implementation, function)
    AttentionMaskInterface.register(implementation, make_mask)


def _take(implementation: str) -> None:
    # transformers registers but does not unregister.
    AttentionInterface._global_mapping.pop(implementation, None)
    AttentionMaskInterface._global_mapping.pop(implementation, None)
