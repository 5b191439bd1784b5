"""`attnlab.replace` and `attnlab.restore`: variants in the place of a model's own attention, with the model's own weights.

    report = attnlab.replace(model, {"name": "sliding_window", "left": 255}, where="encoder.*")
    print(report)          # what was swapped, what not and why
    attnlab.restore(model)

Known are `torch.nn.MultiheadAttention`, timm's `Attention`, and attention layers of Hugging Face models. Needs torch; transformers
is imported only for a model of that library.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from attnlab._quoting import quoted
from attnlab.catalogue import info
from attnlab.errors import InvalidInput, UnsupportedRequest
from attnlab.integrations._in_place_layers import (
    ORIGINAL,
    Layer,
    attention_of,
    hosts,
    joined,
    kind_of,
    original_of,
    places,
)
from attnlab.integrations._snapshot import unless_it_fails
from attnlab.layers.choice import choice, in_words

__all__ = ["Replacement", "replace", "restore"]

Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

# What nn.Module keeps of hooks. The very dicts are shared, so that a hook's handle removes it from either module.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_HELD = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Replacement:
    """What `replace` or `restore` did to a model; `print` it.

    swapped: path -> `torch.nn.MultiheadAttention -> sliding_window(left=255)`. left: path -> why that attention is as it was.
    parameters: names of those that the variants brought, which an optimizer made before does not know; of `restore`: that went.
    """

    swapped: Mapping[str, str]
    left: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"swapped: {len(self.swapped)}", *(f"  {path}: {what}" for path, what in self.swapped.items())]
        lines += [f"left: {len(self.left)}", *(f"  {path or '(the model)'}: {why}" for path, why in self.left.items())]
        if self.parameters:
            lines += [f"the variants' own parameters: {len(self.parameters)}", *(f"  {n}" for n in self.parameters)]
        return "\n".join(lines)


def replace(
    model: nn.Module,
    variant: str | Mapping[str, Any],
    *,
    where: Where = None,
    example: Mapping[str, Any] | None = None,
    replace: bool = False,
    **options: Any,
) -> Replacement:
    """Put `variant` in the place of the attention of `model`, and report what was swapped, what was left and why.

    variant: a registered name with its `options`, or a config such as `{"name": "sliding_window", "left": 255}`. where: a glob pattern
    or several, matched with the paths of `model.named_modules()`, or a function of path and module; all attention by default. example:
    keyword arguments of a Hugging Face model, for a forward that shows the sizes of its layers, and that it computes what it did with
    the exact `dot_product` in them; without one the layers state their sizes, or inputs are made up from its config.

    The model's parameters stay the same objects, so that an optimizer made before goes on training them; hooks and training mode are kept.
    A variant that learns brings parameters of its own, which the report names. Attention that holds a variant already is an `InvalidInput`,
    as what the variant has learned would be lost, unless replace=True takes the original's place anew. Either all that is wanted and known is swapped, or the model is as it was and
    the error says why: `InvalidInput` where nothing matches or can be swapped, and what `attnlab.create` and the adapters raise.
    """
    chosen = choice("replace", variant, options)
    info(chosen["name"])
    layers = attention_of(_checked("replace", model))
    expected = _wanted(model, layers, where)
    able = [layer for layer in expected if not layer.reason]
    if not able:
        reasons = "; ".join(_by_reason(expected))
        raise InvalidInput(f"replace: nothing that was asked for in {type(model).__name__} can be swapped: {reasons}")
    again = [layer for layer in able if original_of(layer.module) or "attnlab" in layer.module._modules]
    if again and not replace:
        raise InvalidInput(
            f"replace: {', '.join(layer.path for layer in again)} of {type(model).__name__} {'hold' if len(again) > 1 else 'holds'} a "
            "variant already, and what it has learned would be lost; choose other attention with where=, call "
            "attnlab.restore(model) first, or pass replace=True"
        )
    with unless_it_fails(model):
        made = [(layer, _made(layer, chosen)) for layer in able if layer.make is not None]
        _install(model, [layer for layer in able if layer.host is not None], chosen, example, replace)
        held = places(model)
        for layer, new in made:
            _put(held[id(layer.module)], new)
    result = in_words(chosen)
    return Replacement(
        {layer.path: f"{kind_of(original_of(layer.module) or layer.module)} -> {result}" for layer in able},
        {
            layer.path: layer.reason if layer in expected else "where= does not choose it"
            for layer in layers
            if layer not in able
        },
        tuple(name for layer in able for name in _own_parameters(model, layer.path)),
    )


def restore(model: nn.Module) -> Replacement:
    """Put the attention back that `replace` took out of `model`, with the weights as they are now; the report says where.

    Variants that `install` put into layers of a Hugging Face model are taken out as well. What the variants themselves learned goes,
    and is named in the report. A model without variants is left alone. Raises
    `InvalidInput`, and changes nothing, where a parameter of a swapped module was taken out of it since, by `parametrize` or pruning.
    """
    swapped = [(path, module) for path, module in _checked("restore", model).named_modules() if original_of(module)]
    for path, module in swapped:
        _check_whole("restore", path, module)
    with unless_it_fails(model):
        return _restore(model, swapped)


def _restore(model: nn.Module, swapped: list[tuple[str, Any]]) -> Replacement:
    done: dict[str, str] = {}
    went: list[str] = []
    held = places(model)
    for path, module in swapped:
        went += _own_parameters(model, path)
        original = _settled(module)
        done[path] = f"{module.attention.name} -> {kind_of(original)}"
        for parent, name in held[id(module)]:
            parent._modules[name] = original
    for outer, host in hosts(model).items():
        from attnlab.integrations.transformers.installation import uninstall

        inside: dict[str, Any] = {p: module for p, module in host.named_modules() if "attnlab" in module._modules}
        names = {path: module.attnlab.name for path, module in inside.items()}
        went += [n for path in inside for n in _own_parameters(model, joined(outer, path))]
        for path in uninstall(host):  # type: ignore[arg-type]
            done[joined(outer, path)] = f"{names[path]} -> {kind_of(inside[path])}"
    return Replacement(done, {}, tuple(went))


def _checked(subject: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"{subject}: model must be a torch.nn.Module, got {type(model).__name__}")
    return model


def _wanted(model: nn.Module, layers: list[Layer], where: Where) -> list[Layer]:
    """The layers that `where` chooses; `InvalidInput` where there are none."""
    kind = type(model).__name__
    if not layers:
        raise InvalidInput(f"replace: {kind} has no module that looks like attention")
    if where is None:
        return layers
    if callable(where):
        selection = [layer for layer in layers if where(layer.path, layer.module)]
        words = "the function in where="
    else:
        patterns = [where] if isinstance(where, str) else where
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise InvalidInput(
                f"replace: where must be glob patterns or a function of path and module, got {quoted(where)}"
            )
        selection = [layer for layer in layers if any(fnmatchcase(layer.path, pattern) for pattern in patterns)]
        words = f"where={quoted(where)}"
    if not selection:
        paths = ", ".join(layer.path or "(the model)" for layer in layers)
        raise InvalidInput(f"replace: {words} chooses no attention of {kind}, which has {paths}")
    return selection


def _by_reason(layers: list[Layer]) -> list[str]:
    """One clause for each reason, with the paths that it holds for."""
    results: dict[str, list[str]] = {}
    for layer in layers:
        results.setdefault(layer.reason, []).append(layer.path or "(the model)")
    return [f"{', '.join(paths)}: {reason}" for reason, paths in results.items()]


def _made(layer: Layer, chosen: Mapping[str, Any]) -> nn.Module:
    """The module that stands for the layer's, holding its parameters and children; the model is not touched."""
    assert layer.make is not None
    source = layer.module
    if original_of(source):
        _check_whole("replace", layer.path, source)
        source = _settled(source)
    try:
        new = layer.make(source, chosen)
    except (InvalidInput, UnsupportedRequest) as error:
        error.args = (f"replace: {layer.path}: {error}", *error.args[1:])
        raise
    for held in _HELD:
        getattr(new, held).update(getattr(source, held))
    for hooks in _HOOKS:
        new.__dict__[hooks] = source.__dict__[hooks]
    new.__dict__[ORIGINAL] = source
    return new


def _check_whole(subject: str, path: str, module: nn.Module) -> None:
    """`InvalidInput` where a module that was swapped in has lost a parameter that it holds for its original."""
    original = original_of(module)
    lost = [name for held in _HELD for name in getattr(original, held) if name not in getattr(module, held)]
    if lost:
        raise InvalidInput(
            f"{subject}: {path} no longer holds {', '.join(lost)}; take back what was done to it first, by "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        )


def _settled(module: nn.Module) -> nn.Module:
    """The original of a module that was swapped in, holding what that one holds now, and in its mode."""
    original = original_of(module)
    assert original is not None
    for held in _HELD:
        now = getattr(module, held)
        getattr(original, held).update({name: now[name] for name in getattr(original, held)})
    for hooks in _HOOKS:
        original.__dict__[hooks] = module.__dict__[hooks]
    original.training = module.training
    return original


def _put(held: list[tuple[nn.Module, str]], new: nn.Module) -> None:
    for parent, name in held:
        parent._modules[name] = new


def _install(
    model: nn.Module, layers: list[Layer], chosen: Mapping[str, Any], example: Mapping[str, Any] | None, replace: bool
) -> None:
    """The variant in layers of Hugging Face models."""
    if not layers:
        return
    from attnlab.integrations.transformers.installation import install

    results: dict[str, Any] = {path: host for path, host in hosts(model).items() if path in {x.host for x in layers}}
    for path, host in results.items():
        inside = [x.path[len(path) + 1 if path else 0 :] for x in layers if x.host == path]
        install(host, chosen, layers=[glob.escape(p) for p in inside], example=example, replace=replace)


def _own_parameters(model: nn.Module, path: str) -> list[str]:
    """Full names of the parameters that the variant at `path` has beside the model's."""
    module = model.get_submodule(path)
    own = ("attention.", "gates.") if original_of(module) else ("attnlab.",)
    return [joined(path, name) for name, _ in module.named_parameters() if name.startswith(own)]
