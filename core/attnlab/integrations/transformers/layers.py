"""The attention layers of a transformers model: which modules ask for an implementation, and what they hand to it.

Needs transformers. A layer is known by its path, as `model.named_modules()` has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlab.errors import AttnlabError, InvalidInput
from attnlab.integrations._snapshot import looking_on
from attnlab.integrations.transformers.configs import chosen
from attnlab.layers.arguments import placement

# How every attention module there asks for the function of its implementation.
_ASKS = "get_interface("
# By what names layers of the usual kind hold their projections and sizes.
_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_WIDTHS = ("head_dim", "attention_head_size")
_HEADS = ("num_heads", "num_attention_heads")


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
        return any(f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.") for other in listening)

    return [
        path
        for path, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and any(True for _ in module.parameters()) and not hears(path)
    ]


@cache
def _asks(kind: Any) -> bool:
    try:
        return _ASKS in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # written where no source is kept
        return False


def others_than(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules of `model` that attend and are not among `layers`."""
    rest = [path for path in (*attention_layers(model), *deaf_layers(model)) if path not in layers]
    return [model.get_submodule(path) for path in rest]


def sizes_of_layers(
    model: PreTrainedModel, expected: Collection[str], example: Mapping[str, Any] | None = None
) -> dict[str, LayerSizes]:
    """The sizes of the layers of `model` at the paths `wanted`.

    With an `example`, those that one forward on it shows. Layers of the usual kind say their own where it misses them, and without one;
    only for the others the model then runs, on inputs made up from its config. `InvalidInput` where a forward fails or misses a layer.
    """
    kind, layers = type(model).__name__, attention_layers(model)
    known = {path: sizes for path in expected if (sizes := _own_sizes(layers[path])) is not None}
    if example is None and len(known) == len(expected):
        return known
    shown = _shown_sizes(model, layers, _made_up(model) if example is None else dict(example))
    silent = [path for path in expected if path not in shown and path not in known]
    if silent:
        raise InvalidInput(
            f"{kind}: {', '.join(silent)} took no part in the forward that shows the sizes of layers; pass an "
            "example={...} that reaches them, or choose layers without them"
        )
    return {path: shown.get(path) or known[path] for path in expected}


def _own_sizes(layer: nn.Module) -> LayerSizes | None:
    """The sizes that a layer's projections and attributes agree on; None where it is not of the usual kind."""
    kind: Any = type(layer)
    names = next((n for n in _PROJECTIONS if all(hasattr(layer, one) for one in n)), None)
    width = next((result for word in _WIDTHS if isinstance(result := getattr(layer, word, None), int)), 0)
    heads = next((result for word in _HEADS if isinstance(result := getattr(layer, word, None), int)), 0)
    heads = heads or getattr(getattr(layer, "config", None), "num_attention_heads", 0)
    if names is None or not width or not heads or not _hands_over_as_projected(kind):
        return None
    query, key, value = (getattr(layer, name) for name in names)
    if not all(hasattr(one, "out_features") and hasattr(one, "in_features") for one in (query, key, value)):
        return None
    kv_heads, rest = divmod(key.out_features, width)
    if query.out_features != heads * width or rest or not kv_heads or value.out_features != key.out_features:
        return None
    return LayerSizes(heads, kv_heads, width, width, key.in_features)


@cache
def _hands_over_as_projected(kind: Any) -> bool:
    source = inspect.getsource(kind.forward)
    return not any(word in source for word in ("repeat", "torch.cat", "concat", "chunk(", "split(", "pad("))


def _shown_sizes(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any]
) -> dict[str, LayerSizes]:
    """The sizes of every layer that one forward reaches; the model is then as it was. Every layer gives zeros."""
    paths = {id(module): path for path, module in layers.items()}
    widths: dict[str, int] = {}
    results: dict[str, LayerSizes] = {}

    def note_width(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        widths[paths[id(module)]] = source_of(args, kwargs).shape[-1]

    def note_sizes(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        path = paths[id(module)]
        results[path] = LayerSizes(query.shape[1], key.shape[1], query.shape[3], value.shape[3], widths[path])
        batch, heads, length, _width = query.shape
        return query.new_zeros(batch, length, heads, value.shape[3]), None

    with looking_on(model), chosen(model, "attnlab_sizes", note_sizes, layers):
        for module in layers.values():
            module.register_forward_pre_hook(note_width, with_kwargs=True)
        run(model, inputs, "a forward that shows the sizes of its layers")
    return results


def run(model: PreTrainedModel, inputs: Mapping[str, Any], purpose: str) -> Any:
    """What `model` gives; `InvalidInput` where it fails."""
    try:
        return model(**inputs)
    except AttnlabError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{type(model).__name__}: {purpose} failed with {type(error).__name__}: {error}; pass example={{...}}, "
            "keyword arguments that it takes"
        ) from error


def source_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer makes its keys from, `[B, L, width]`, by the arguments of its call: the other side's in cross-attention."""
    other = cross_source(kwargs)
    return queries_of(args, kwargs) if other is None else other


def queries_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer makes its queries from: `hidden_states`, or by whatever name it takes its first tensor."""
    named = kwargs.get("hidden_states")
    if not args and isinstance(named, Tensor):
        return named
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    if first is None:
        raise InvalidInput("a layer's call holds no tensor, so that nothing shows its width")
    return first


def cross_source(kwargs: Mapping[str, Any]) -> Tensor | None:
    """The other side's states, where a layer's call has some."""
    for word in ("key_value_states", "encoder_hidden_states"):
        if kwargs.get(word) is not None:
            inputs: Tensor = kwargs[word]
            return inputs
    return None


def _made_up(model: PreTrainedModel) -> dict[str, Tensor]:
    """Small inputs that the model's config says it takes; `InvalidInput` where it does not say enough."""
    try:
        return _example(model)
    except Exception as error:  # configs hold whatever their models want
        raise InvalidInput(
            f"{type(model).__name__}: no inputs for a forward that shows the sizes of its layers could be made up from its config "
            f"({type(error).__name__}: {error}); pass example={{...}}, keyword arguments that it takes"
        ) from error


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
