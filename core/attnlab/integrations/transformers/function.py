"""The function that transformers calls in an attention layer, and what its arguments mean as arguments of a variant. Needs torch.

docs/contract.md, "Adapters", is the law: a tensor mask is complete, None is causal exactly in a causal module, and nothing is dropped.
Restarting position_ids are sequences packed in one row, which see nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnlab.cache import BoundedCache
from attnlab.call import AttentionOutput, signature_of
from attnlab.capabilities import Capabilities
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._torch_masks import bias_of
from attnlab.integrations.transformers.arguments import Words, dropout_setting, words_of
from attnlab.integrations.transformers.masks import asked_of, is_additive, rule_of
from attnlab.integrations.transformers.packing import packed_sequences
from attnlab.integrations.transformers.weights import weights_are_wanted
from attnlab.interface import Attention
from attnlab.visibility import AttentionMask

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

    def query_factor(self, scale: float) -> float | None: ...

    @property
    def forward(self) -> Callable[..., AttentionOutput]: ...

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /, **request: Any) -> AttentionOutput: ...


class Source(Protocol):
    """Who serves a layer."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee: ...


class ModelFunction:
    """The function that transformers calls in each layer; `source` says what serves a layer.

    bare: nobody but this function holds what `source` gives, so that it can have no hooks, and its `forward` is called.
    """

    def __init__(self, source: Source, *, bare: bool = False) -> None:
        self.source, self.bare = source, bare
        self._functions = BoundedCache()  # by what a call says, its signature and its scale

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
        request, refused, segments = words_of(kwargs, query, key) if kwargs else Words({}, {}, None)
        if weights_are_wanted(module):
            request["need_weights"] = True  # refused if the variant has none
        n_q, n_k = query.shape[2], key.shape[2]
        window = kwargs.get("sliding_window") if attention_mask is None and kwargs else None
        if attention_mask is not None:
            rules = asked_of(attention_mask)
        else:
            if is_causal is None:
                is_causal = getattr(module, "is_causal", False)
            causal = is_causal and n_q > 1 and not is_additive(getattr(module, "config", None))
            rules = _CAUSAL if causal else _NOTHING
        packed = None
        if kwargs and n_q > 0 and (positions := kwargs.get("position_ids")) is not None:
            packed = packed_sequences(module, positions, attention_mask, "causal" in (rules or ()), n_q, n_k)
            if packed is not None:
                attention_mask, rules = packed.mask, None if packed.said is None else {"mask": packed.said}
        signature, mask, generation = None, None, 0
        plain = not (request or refused or dropout or segments)
        if self.bare and rules is not None and window is None and plain and not torch.compiler.is_compiling():
            # The fast path of small inputs, as `attnlab.attention` has it.
            generation = self._functions.generation
            signature, mask = _signature_of(query, key, value, rules, scaling)
            function = self._functions.get(signature) if signature else None
            if function is not None and not torch._C._is_any_autocast_enabled():
                out = function(query, key, value) if mask is None else function(query, key, value, mask)
                return out.transpose(1, 2).contiguous(), None
        if query.shape[0] != key.shape[0]:
            query, key, value, signature = *_of_one_batch(query, key, value), None
        attention = self.source(module, query, key, value)
        for word, reason in refused.items():
            raise UnsupportedRequest(
                f"{attention.name}: the model passes {word} to its attention, and {reason}; "
                "run this model with its own attention, or call it without that argument"
            )
        if window is not None and window < n_k:
            raise UnsupportedRequest(
                f"{attention.name}: the model asks for a window of {window} keys and built no mask that holds it; "
                "register the mask function together with the attention function"
            )
        if attention_mask is None and rules and n_q != n_k:
            raise UnsupportedRequest(
                f"{attention.name}: a causal layer came without a mask at {n_q} queries and {n_k} keys, "
                "which leaves the alignment open; pass the mask of this implementation"
            )
        _put_mask(attention, request, attention_mask, rules)
        if segments is not None:
            _put_segments(attention, request, segments)
        if scaling is not None:
            inputs, query = query, _put_scale(attention, request, scaling, query)
            if query is not inputs:
                signature = None  # the fast path serves a query as it came
        if dropout:
            _put_dropout(attention, request, dropout, module)
        if n_q != n_k and isinstance(attention, Attention):
            check_positions(attention, query, key, request)
        serve = attention.forward if self.bare else attention
        result = serve(query, key, value, **request)
        if signature and "scale" not in request and isinstance(attention, Attention):
            causal = request.get("causal", False)
            if (function := attention.validated_function(query, key, value, causal, mask)) is not None:
                self._functions.put(signature, function, generation)
        return result.out.transpose(1, 2).contiguous(), result.weights  # [B, Lq, Hq, Dv]


def _signature_of(
    query: Tensor, key: Tensor, value: Tensor, rules: Mapping[str, Any], scaling: float | None
) -> tuple[Any, AttentionMask | None]:
    """The key of such calls on the fast path, None for a call that cannot take it, and the mask if that has a cache."""
    if not (scaling is None or type(scaling) is float):
        return None, None  # a tensor's value may change
    mask = rules.get("mask")
    if mask is None:
        return (signature_of("", query, key, value, "causal" in rules), scaling), None
    cache = mask.cache
    return (None if cache is None else (signature_of(cache.parts, query, key, value, False), scaling)), mask


def check_positions(attention: Attention, query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> None:
    """Refuse to guess where queries stand for a variant that reads positions; a mask with structure says it."""
    n_q, n_k = query.shape[2], key.shape[2]
    reads = attention.reads_query_positions and not attention.capabilities.position_free
    if n_q == n_k or not reads or "offset" in arguments:
        return
    mask = arguments.get("mask")
    if not isinstance(mask, AttentionMask) or mask.offset is None:
        raise UnsupportedRequest(
            f"{attention.name}: it reads positions, and nothing says where these {n_q} queries stand among {n_k} keys; "
            "install(model, ...) knows it in cross-attention, and in causal layers a mask of this implementation does"
        )


def _put_mask(
    attention: Callee, arguments: dict[str, Any], mask: Tensor | None, rules: Mapping[str, Any] | None
) -> None:
    """Who sees whom: what is said of it by structure, else a mask that is complete, a tensor where it is bool and else a bias.

    Packed sequences are segments to variants that read where a sequence begins or take no rule for each pair, and a tensor to the rest.
    """
    able = attention.capabilities
    anywhere = able.mask and (able.position_free or attention.shift_invariant)
    if rules is not None:
        packed = "mask" in rules and rules["mask"].segments is not None
        if not packed or (able.segments and not anywhere):
            arguments.update(rules)
            return
    if not isinstance(mask, Tensor):
        raise InvalidInput(f"{attention.name}: attention_mask must be a tensor or None, got {type(mask).__name__}")
    mask = rule_of(mask)
    if mask.dtype != torch.bool:
        bias = bias_of(mask)
        arguments["bias"] = bias if "bias" not in arguments else arguments["bias"] + bias
        return
    if not anywhere:
        lacks = "does not support mask=, a rule for each pair" if not able.mask else "reads positions"
        raise UnsupportedRequest(
            f"{attention.name} {lacks}, and nothing says that the model's mask is causality, "
            "a window or padding: it packs sequences, has a rule of its own, or came into a graph of torch.compile from outside; "
            "compile or export the whole model, and with attention_mask= (ones where nothing is padded), as without one a "
            "traced model has to suppose packed sequences"
        )
    arguments["mask"] = mask


def _put_segments(attention: Callee, arguments: dict[str, Any], segments: tuple[Tensor, Tensor]) -> None:
    """Sequences packed in one row do not see each other; nothing is added where the model's mask says so already."""
    mask = arguments.get("mask")
    if isinstance(mask, AttentionMask) and mask.segments is not None:
        return
    if attention.capabilities.segments or not attention.capabilities.mask or isinstance(mask, AttentionMask):
        arguments["segments"] = segments
        return
    same = segments[0][:, None, :, None] == segments[1][:, None, None, :]  # [B, 1, Lq, Lk]
    arguments["mask"] = same if mask is None else mask & same


def _put_scale(attention: Callee, arguments: dict[str, Any], scaling: float, query: Tensor) -> Tensor:
    """Hand the model's scale on, and return the query that goes with it.

    A model's scores are `scaling * q k^T`. Where the formula has no scale, its features stand for queries whose scores have the
    usual `Dk^-0.5`, and the variant says what a query with another scale is multiplied by: 1 for `Dk^-0.5`, and `Dk^0.5` where
    the model has scaled the query before and passes 1 (Whisper, OPT), or never scales (T5). A model gives the same whether it
    scales the query or passes the scale. Where the variant says nothing, the scale is passed on and refused by the gate.
    """
    own = attention.default_scale()
    if own is not None and abs(scaling - own) <= _SAME * own:
        return query
    if attention.capabilities.scale:
        arguments["scale"] = scaling
        return query
    usual = query.shape[3] ** -0.5
    if abs(scaling - usual) <= 1e-6 * usual:
        return query
    factor = attention.query_factor(scaling)
    if factor is None:
        arguments["scale"] = scaling
        return query
    return query * factor


def _put_dropout(attention: Callee, arguments: dict[str, Any], dropout: float, module: nn.Module) -> None:
    if not attention.capabilities.dropout:
        setting = dropout_setting(getattr(module, "config", None), dropout)
        where = f"config.{setting} = 0.0" if setting else "the dropout of its attention to 0.0 in its config"
        raise UnsupportedRequest(
            f"{attention.name} does not support dropout_p > 0, and {type(module).__name__} in training drops attention weights "
            f"at {dropout}; make the model with {where}, or call model.eval()"
        )
    arguments["dropout_p"] = dropout


def _of_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same where one side has batch 1, as learned queries have: that side for every element of the batch."""
    if query.shape[0] == 1:
        return query.expand(key.shape[0], -1, -1, -1), key, value
    if key.shape[0] == 1:
        return query, key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    return query, key, value
