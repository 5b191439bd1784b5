"""Variants as modules of a model's layers: what they learn is trained, saved and loaded with it. Needs transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from attnlab.catalogue import create
from attnlab.errors import InvalidInput
from attnlab.integrations._snapshot import unless_it_fails
from attnlab.integrations.transformers.configs import choose, is_ours, put_back, refuse_within_a_block
from attnlab.integrations.transformers.example_check import check_exact
from attnlab.integrations.transformers.installed import (
    IMPLEMENTATION,
    InstalledAttention,
    forget,
    note,
    serve_installed,
)
from attnlab.integrations.transformers.layers import LayerSizes, attention_layers, others_than, sizes_of_layers
from attnlab.layers.arguments import placement
from attnlab.layers.choice import choice, storable

HELD = "_attnlab_configs"  # where a module keeps which of its attributes are copies of configs

Choice = str | Mapping[str, Any]
ByLayer = Choice | Sequence[Choice] | Callable[[str, int], Choice | None]


def install(
    model: PreTrainedModel,
    variant: ByLayer,
    *,
    layers: str | Sequence[str] | None = None,
    example: Mapping[str, Any] | None = None,
    replace: bool = False,
    **options: Any,
) -> list[str]:
    """Put `variant` into every attention layer of `model`, or into those whose paths match `layers`; their paths.

    `variant` is a registered name with its `options`, or a mapping such as `{"name": "sliding_window", "left": 255}`; for layers that
    differ, a list with one of these for each layer, in order, or a function of a layer's path and its place among the model's layers
    from 0 on, which leaves a layer alone by None. `options` hold for all of them.
    Each layer gets an instance of its own as the child `attnlab`: it is trained, moved, copied and saved with the model, and
    `save_pretrained` writes the choice into `config.json`, so that `load(folder)` makes it again. Layers that do not match
    `layers`, glob patterns such as `"decoder.*.self_attn"`, keep the variant that they hold, and compute what they did, by their own
    implementation and masks, where they hold none.

    A layer that holds a variant already is an `InvalidInput`, as what the variant has learned would be lost: `uninstall` it first, or
    pass `replace=True`.

    The model holds a copy of its config from then on, until `uninstall`: another model that shares the config is not touched.
    The sizes of the layers are those that the layers state; where some do not, one forward of inputs made up from the config shows them.
    With `example`, keyword arguments of the model, they are those of a forward on it, and the model has to give there, with the
    exact `dot_product` in these layers, what it gives without. Raises what `attnlab.create` raises, `InvalidInput` where no layer
    matches or a forward fails, and `UnsupportedRequest` where the model gives something else on the example; the model is then as
    it was.
    """
    refuse_within_a_block("install", model)
    expected = _chosen_by_layer(model, variant, options, layers)
    holding = _holding(model)
    again = [path for path in expected if path in holding]
    if again and not replace:
        raise InvalidInput(
            f"install: {', '.join(again)} of {type(model).__name__} {'hold' if len(again) > 1 else 'holds'} "
            f"{', '.join(sorted({holding[path].name for path in again}))} already, and what it has learned would be lost; choose "
            "other layers with layers=, call uninstall(model, layers=...) first, or pass replace=True"
        )
    stored = _stored(model.config)
    with unless_it_fails(model):
        _put_configs_back(model)
        _detach(model, again)
        sizes = sizes_of_layers(model, list(expected), example)
        made = _made({path: (chosen, sizes[path]) for path, chosen in expected.items()})
        if example is not None:
            check_exact("install", model, {path: model.get_submodule(path) for path in expected}, example)
        _attach(model, made)
        now = {path: {"variant": chosen, **sizes[path]._asdict()} for path, chosen in expected.items()}
        _choose(model, {**stored, **now})
    return list(expected)


def uninstall(model: PreTrainedModel, layers: str | Sequence[str] | None = None) -> list[str]:
    """Take installed variants out of `model`, or out of the layers whose paths match `layers`; the paths of the layers they were in.

    With the last one the model holds its own configs again. `InvalidInput` where `layers` matches none that holds one.
    """
    refuse_within_a_block("uninstall", model)
    holding = _holding(model)
    paths = _matching(holding, layers)
    if layers is not None and not paths:
        raise InvalidInput(
            f"uninstall: no layer of {type(model).__name__} that matches {', '.join(_patterns(layers))} holds a variant; "
            f"{', '.join(holding) or 'none'} does"
        )
    stored = _stored(model.config)
    with unless_it_fails(model):
        _put_configs_back(model)
        _detach(model, paths)
        if len(paths) < len(holding):
            _choose(model, {path: facts for path, facts in stored.items() if path not in paths})
    return paths


def _chosen_by_layer(
    model: PreTrainedModel, variant: ByLayer, options: Mapping[str, Any], layers: str | Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    """The config of a variant for each layer that gets one, by path."""
    results = list(attention_layers(model))
    expected = _matching(results, layers)
    if not expected:
        raise InvalidInput(
            f"install: no attention layer of {type(model).__name__} matches {', '.join(_patterns(layers))}; it has "
            f"{', '.join(results) or 'none that asks for an implementation'}"
        )
    arguments: dict[str, Any]
    if callable(variant):
        arguments = {path: variant(path, results.index(path)) for path in expected}
        arguments = {path: one for path, one in arguments.items() if one is not None}
        if not arguments:
            raise InvalidInput("install: the function in variant gives None for every layer")
    elif isinstance(variant, Sequence) and not isinstance(variant, str):
        if len(variant) != len(expected):
            raise InvalidInput(
                f"install: a list of variants has one for each of the {len(expected)} layers {', '.join(expected)}, got {len(variant)}"
            )
        arguments = dict(zip(expected, variant, strict=True))
    else:
        arguments = dict.fromkeys(expected, variant)
    return {path: storable("install", choice("install", one, options)) for path, one in arguments.items()}


def _patterns(layers: str | Sequence[str] | None) -> list[str]:
    return ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)


def _matching(paths: Iterable[str], layers: str | Sequence[str] | None) -> list[str]:
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in _patterns(layers))]


def _holding(model: nn.Module) -> dict[str, InstalledAttention]:
    """The variants that layers of `model` hold, by the layers' paths."""
    results = {path: module._modules.get("attnlab") for path, module in attention_layers(model).items()}
    return {path: held for path, held in results.items() if isinstance(held, InstalledAttention)}


def _stored(config: Any) -> dict[str, dict[str, Any]]:
    """What a config says of each layer with a variant, by path: its sizes and its variant's config; empty where it says nothing.

    Configs of releases that knew one variant for a model name it once, beside the layers.
    """
    stored = getattr(config, "attnlab", None)
    if not isinstance(stored, dict) or not isinstance(stored.get("layers"), dict):
        return {}
    common = {"variant": stored["variant"]} if "variant" in stored else {}
    return {path: {**common, **facts} for path, facts in stored["layers"].items()}


def load(folder: Any, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> PreTrainedModel:
    """The model that `save_pretrained` wrote after `install`, its variants and what they learned included.

    `model_class` defaults to the architecture that its config names; `arguments` are those of `from_pretrained`.
    Raises `InvalidInput` where the folder's config names no variant.
    """
    config = arguments.pop("config", None) or AutoConfig.from_pretrained(folder)
    stored = _stored(config)
    if not stored:
        raise InvalidInput(
            f"load: the config in {folder} names no attnlab variant; install() writes one, from_pretrained loads the rest"
        )
    if model_class is None:
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
        if model_class is None:
            raise InvalidInput(f"load: transformers knows no architecture {config.architectures}; pass model_class=")
    original: Any = model_class

    def init(self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, config, *args, **kwargs)
        chosen = {path: dict(facts) for path, facts in stored.items()}
        _attach(self, _made({path: (one.pop("variant"), LayerSizes(**one)) for path, one in chosen.items()}))

    # The model is made with its own implementation, as it was before the variants came.
    config = copy.deepcopy(config)
    implementation = config.attnlab.get("implementation")
    del config.attnlab
    config.__dict__.pop("attn_implementation", None)
    config._attn_implementation = implementation
    # from_pretrained makes the model and then reads weights for what it holds: it must hold the variants by then.
    holding: Any = type(original.__name__, (original,), {"__init__": init, "__module__": original.__module__})
    model: PreTrainedModel = holding.from_pretrained(folder, config=config, **arguments)
    model.__class__ = original
    _choose(model, stored)
    return model


def _made(layers: Mapping[str, tuple[Mapping[str, Any], LayerSizes]]) -> dict[str, InstalledAttention]:
    return {
        path: InstalledAttention(
            create(
                num_heads=sizes.num_heads,
                head_dim=sizes.head_dim,
                num_kv_heads=sizes.num_kv_heads,
                value_dim=sizes.value_dim,
                **chosen,
            ),
            sizes.width,
        )
        for path, (chosen, sizes) in layers.items()
    }


def _attach(model: PreTrainedModel, made: Mapping[str, InstalledAttention]) -> None:
    for path, installed in made.items():
        module = model.get_submodule(path)
        module.attnlab = installed.to(*placement(module, model)).train(module.training)
        module.register_forward_pre_hook(note, with_kwargs=True)
        module.register_forward_hook(forget, always_call=True)


def _detach(model: PreTrainedModel, paths: Iterable[str]) -> None:
    for path in paths:
        module = model.get_submodule(path)
        del module.attnlab
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is note:
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        for number, hook in list(module._forward_hooks.items()):
            if hook is forget:
                del module._forward_hooks[number]
                module._forward_hooks_always_called.pop(number, None)


def _choose(model: PreTrainedModel, stored: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the layers that hold a variant call it, and the config of `model` name it in files. stored: facts of those layers, by path."""
    every = attention_layers(model)
    layers = {path: module for path, module in every.items() if path in stored}
    around = model.config._attn_implementation  # what the other layers run
    serve_installed()
    for one in choose(model, IMPLEMENTATION, list(layers.values()), others_than(model, layers)):
        one.module.__dict__.setdefault(HELD, []).append(one)
    model.config.attnlab = {"layers": {path: dict(stored[path]) for path in layers}}
    if len(layers) < len(every) and is_ours(around):
        model.config.attnlab["implementation"] = around
    model.config.attn_implementation = IMPLEMENTATION


def _put_configs_back(model: nn.Module) -> None:
    put_back([one for module in model.modules() for one in module.__dict__.pop(HELD, [])])
