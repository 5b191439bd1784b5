"""`attnlab.capture`: the attention weights of every layer of a model, by path, whatever the layers themselves return. Needs torch.

with attnlab.capture(model) as captured:
    model(x)
captured.maps["layers.0.self_attn.attention"]      # [B, H, Lq, Lk]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from attnlab.call import AttentionOutput
from attnlab.errors import AttnlabError, InvalidInput
from attnlab.interface import Attention

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """What `capture` yields. maps: path of the variant -> its weights `[B, H, Lq, Lk]` in its last call, before dropout, detached."""

    maps: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def capture(model: nn.Module) -> Iterator[Captured]:
    """Keep the weights of every attnlab variant that `model` calls within the block; its outputs are the same, but for roundings.

    Every `Attention` in the model is asked for its weights: in `MultiHeadAttention`, in the drop-in for torch's, in Hugging Face models
    by `install`, and wherever `attnlab.replace` put one. A variant that has none refuses by name (`UnsupportedRequest`) when it is called.
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
            ask, keep = _watch(captured.maps, path)
            # Hooks that were there see the call before this one changes it, and the output as the caller gets it.
            hooks.callback(variant.register_forward_pre_hook(ask, with_kwargs=True).remove)
            hooks.callback(variant.register_forward_hook(keep, with_kwargs=True, prepend=True).remove)
        yield captured
    if not captured.maps:
        raise AttnlabError(
            f"capture: expected a call of {', '.join(variants)} within the block, got none; call this very model, and not a compiled one"
        )


Ask = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Keep = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], AttentionOutput], AttentionOutput | None]


def _watch(maps: dict[str, Tensor], path: str) -> tuple[Ask, Keep]:
    """Two hooks: one that asks for weights, and one that keeps them and takes them out where the caller had not asked."""
    asked_before: list[bool] = []

    def ask(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked_before[:] = [bool(kwargs.get("need_weights"))]
        return args, {**kwargs, "need_weights": True}

    def keep(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: AttentionOutput
    ) -> AttentionOutput | None:
        assert output.weights is not None
        maps[path] = output.weights.detach()
        return None if asked_before[0] else output._replace(weights=None)

    return ask, keep
