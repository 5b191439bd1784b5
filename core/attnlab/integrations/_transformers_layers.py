"""The attention layers of a transformers model: which modules ask for an implementation, and what they hand to it.

Needs transformers. A layer is known by its path, as `model.named_modules()` has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnlab._module_arguments import placement
from attnlab.errors import AttnlabError, InvalidInput
from attnlab.integrations._transformers_masks import make_mask

# How every attention module there asks for the function of its implementation.
_ASKS = "get_interface("


class LayerSizes(NamedTuple):
    """What one layer hands to its implementation: heads, widths of one head, and the width of its own input."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    width: int


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that ask for an attention implementation, by path, in order."""
    return {path: module for path, module in model.named_modules() if _asks(module.__class__)}


def deaf_layers(model: nn.Module) -> list[str]:
    """Paths of attention modules, by the names of their classes, in which nothing asks for an implementation."""
    listening = attention_layers(model)

    def hears(path: str) -> bool:
        return any(
            f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.") for other in listening
        )

    return [
        path
        for path, module in model.named_modules()
        if "attention" in type(module).__name__.lower()
        and any(True for _ in module.parameters())
        and not hears(path)
    ]


@cache
def _asks(kind: Any) -> bool:
    try:
        return _ASKS in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # written where no source is kept
        return False


def put(implementation: str, function: Callable[..., Any]) -> None:
    """Make attention and mask function known together: without a mask function transformers drops causality."""
    AttentionInterface.register(implementation, function)
    AttentionMaskInterface.register(implementation, make_mask)


def take(implementation: str) -> None:
    # transformers registers but does not unregister.
    AttentionInterface._global_mapping.pop(implementation, None)
    AttentionMaskInterface._global_mapping.pop(implementation, None)


def implementations(model: PreTrainedModel) -> dict[str, str | None]:
    """The implementation of each part of `model` that has one of its own, by path; the model itself is ''."""
    return {path: part.config._attn_implementation for path, part in _parts(model)}


def choose(model: PreTrainedModel, implementation: str) -> None:
    """Set every part of `model` to `implementation`; `AttnlabError` where one keeps its own."""
    before = implementations(model)
    try:
        model.set_attn_implementation(implementation)
        kept = sorted({str(now) for now in implementations(model).values() if now != implementation})
        if kept:
            raise AttnlabError(
                f"{type(model).__name__} does not let its attention be set; it keeps {', '.join(kept)}"
            )
    except BaseException:  # an interrupt too: no part is left with another than the rest
        put_back(model, before)
        raise


def put_back(model: PreTrainedModel, before: Mapping[str, str | None]) -> None:
    """What `implementations` said; parts that are new since keep theirs."""
    for path, part in _parts(model):
        if path in before:
            part.config._attn_implementation_internal = before[path]


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, PreTrainedModel]]:
    return ((path, part) for path, part in model.named_modules() if isinstance(part, PreTrainedModel))


@contextmanager
def chosen(model: PreTrainedModel, implementation: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function` in every layer for the length of the block, and what was there put back after it."""
    before = implementations(model)
    put(implementation, function)
    try:
        choose(model, implementation)
        yield
    finally:
        put_back(model, before)
        take(implementation)


def sizes_of_layers(
    model: PreTrainedModel, example: Mapping[str, Any] | None = None
) -> dict[str, LayerSizes]:
    """The sizes of every layer that one forward of `model` on `example` reaches; made up from its config by default.

    The forward runs without gradients and in eval mode, and every layer gives zeros. `InvalidInput` where it fails.
    """
    paths = {id(module): path for path, module in attention_layers(model).items()}
    widths: dict[str, int] = {}
    found: dict[str, LayerSizes] = {}

    def note_width(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        widths[paths[id(module)]] = source_of(args, kwargs).shape[-1]

    def note_sizes(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        path = paths[id(module)]
        found[path] = LayerSizes(query.shape[1], key.shape[1], query.shape[3], value.shape[3], widths[path])
        batch, heads, length, _width = query.shape
        return query.new_zeros(batch, length, heads, value.shape[3]), None

    hooks = [
        module.register_forward_pre_hook(note_width, with_kwargs=True)
        for module in attention_layers(model).values()
    ]
    training = {part: part.training for part in model.modules()}
    inputs = _example(model) if example is None else dict(example)
    try:
        with chosen(model, "attnlab_sizes", note_sizes), torch.no_grad():
            nn.Module.eval(model)
            model(**inputs)
    except AttnlabError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{type(model).__name__}: a forward that shows the sizes of its layers failed with "
            f"{type(error).__name__}: {error}; pass example={{...}}, keyword arguments that it takes"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in training.items():
            part.training = mode
    return found


def source_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer makes its keys from, `[B, L, width]`, by the arguments of its call: the other side's in cross-attention."""
    other = cross_source(kwargs)
    if other is not None:
        return other
    source: Tensor = args[0] if args else kwargs["hidden_states"]
    return source


def cross_source(kwargs: Mapping[str, Any]) -> Tensor | None:
    """The other side's states, where a layer's call has some."""
    for word in ("key_value_states", "encoder_hidden_states"):
        if kwargs.get(word) is not None:
            given: Tensor = kwargs[word]
            return given
    return None


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Small inputs that the model's config says it takes."""
    device, config = placement(model)[0], model.config
    vision, made = getattr(config, "vision_config", config), {}
    names = inspect.signature(model.forward).parameters
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    if "input_ids" in names:
        made["input_ids"] = ids
    if "pixel_values" in names:
        size = vision.image_size if isinstance(vision.image_size, (tuple, list)) else [vision.image_size] * 2
        made["pixel_values"] = torch.zeros(1, vision.num_channels, *size, device=device, dtype=model.dtype)
    if "input_features" in names:
        frames = 2 * config.max_source_positions
        made["input_features"] = torch.zeros(1, config.num_mel_bins, frames, device=device, dtype=model.dtype)
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = ids
    return made
