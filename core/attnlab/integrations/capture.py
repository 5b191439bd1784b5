"""`attnlab.capture`: the attention weights of every layer of a model, by path, whatever the layers themselves return. Needs torch.

with attnlab.capture(model) as captured:
    model(x)
captured.maps["layers.0.self_attn.attention"]      # [B, H, Lq, Lk]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.call import AttentionOutput
from attnlab.errors import AttnlabError, InvalidInput
from attnlab.integrations._call_facts import FactsOfCalls
from attnlab.interface import Attention

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """What `capture` yields. maps: path of the variant -> its weights `[B, H, Lq, Lk]` in its last call, before dropout, detached."""

    maps: dict[str, Tensor] = field(default_factory=dict)


_blocks: ContextVar[tuple[Captured, ...]] = ContextVar("attnlab_capture_blocks", default=())
_calls = FactsOfCalls("attnlab_captured_calls")


@contextmanager
def capture(model: nn.Module) -> Iterator[Captured]:
    """Keep the weights of every attnlab variant that `model` calls within the block; its outputs are the same, but for roundings.

    Every `Attention` in the model is asked for its weights: in `MultiHeadAttention`, in the drop-in for torch's, in Hugging Face models
    by `install`, and wherever `attnlab.replace` put one. A variant that has none refuses by name (`UnsupportedRequest`) when it is called.
    Calls of the same model from other threads are left alone: each thread captures its own.
    Raises `InvalidInput` where the model holds no `Attention`, and `AttnlabError` where the block ends without a call of any.
    """
    variants = {path: module for path, module in model.named_modules() if isinstance(module, Attention)}
    if not variants:
        raise InvalidInput(
            f'capture: {type(model).__name__} holds no attnlab variant; put some in with attnlab.replace(model, "dot_product"). '
            "A Hugging Face model that has one by name holds none, and gives its weights for output_attentions=True"
        )
    captured = Captured()
    with ExitStack() as hooks:
        for path, variant in variants.items():
            ask, keep = _watch(captured, path)
            # Hooks that were there see the call before this one changes it, and the output as the caller gets it.
            hooks.callback(variant.register_forward_pre_hook(ask, with_kwargs=True).remove)
            kept = variant.register_forward_hook(keep, with_kwargs=True, prepend=True, always_call=True)
            hooks.callback(kept.remove)
        _blocks.set((*_blocks.get(), captured))
        hooks.callback(lambda: _blocks.set(tuple(block for block in _blocks.get() if block is not captured)))
        yield captured
    if not captured.maps:
        raise AttnlabError(
            f"capture: expected a call of {', '.join(variants)} within the block, got none; call this very model, and not a compiled one"
        )


Ask = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Keep = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], AttentionOutput | None], AttentionOutput | None]


def _watch(captured: Captured, path: str) -> tuple[Ask, Keep]:
    """Two hooks: one that asks for weights, and one that keeps them and takes them out where the caller had not asked."""

    def ask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.compiler.is_compiling() and all(block is not captured for block in _blocks.get()):
            return args, kwargs  # a call from another thread
        _calls.push(module, (captured, bool(kwargs.get("need_weights"))))
        return args, {**kwargs, "need_weights": True}

    def keep(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: AttentionOutput | None
    ) -> AttentionOutput | None:
        facts = _calls.of(module)
        if facts is None or facts[0] is not captured:
            return None
        _calls.pop(module)
        if output is None:  # the call failed
            return None
        assert output.weights is not None
        captured.maps[path] = output.weights.detach()
        return None if facts[1] else output._replace(weights=None)

    return ask, keep
