"""An implementation for some layers of a transformers model alone: these hold copies of the model's configs. Needs transformers.

That library reads an implementation's name from the config that a module holds. Layers that are swapped, and what is around them and makes
their masks, hold copies that name ours; every other attention layer, and whatever shares the configs, holds the ones it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnlab.errors import InvalidInput
from attnlab.integrations._snapshot import configs_of, is_config
from attnlab.integrations.transformers.masks import ADDITIVE, make_mask

_NAME = "_attn_implementation_internal"
_OURS = frozenset({_NAME, "attnlab", "attn_implementation"})  # what a copy has of us
_blocks: dict[str, int] = {}  # the implementations of `chosen` blocks that are open, and the thread of each


class Holding(NamedTuple):
    """One attribute of one module that holds a copy for the length of a swap. before: the copy's attributes at first."""

    module: nn.Module
    attribute: str
    original: Any
    copy: Any
    before: dict[str, Any]


def put(implementation: str, function: Callable[..., Any]) -> None:
    """Make attention and mask function known together: without a mask function transformers drops causality."""
    for name in (implementation, implementation + ADDITIVE):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)


def take(implementation: str) -> None:
    # transformers registers but does not unregister.
    for name in (implementation, implementation + ADDITIVE):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def is_ours(implementation: str | None) -> bool:
    """Whether `put` made it known."""
    return implementation is not None and AttentionMaskInterface._global_mapping.get(implementation) is make_mask


def choose(
    model: PreTrainedModel, implementation: str, layers: Collection[nn.Module], others: Collection[nn.Module]
) -> list[Holding]:
    """`implementation` for `layers` of `model`, and not for `others`, which attend too; `put_back` takes what it gives.

    `InvalidInput` where a layer holds no config.
    """
    originals = {id(config): config for config in configs_of(model)}
    named = _named(model, layers)
    if others:
        _check_masks(model, [originals[one] for one in named])
    copies: dict[int, Any] = {}
    for config in originals.values():
        _copy(config, named, implementation, copies)
    apart = {id(part) for other in others for part in other.modules()} - {
        id(part) for layer in layers for part in layer.modules()
    }
    before = {id(copy): dict(copy.__dict__) for copy in copies.values() if copy is not None}
    held = [
        Holding(module, attribute, value, copies[id(value)], before[id(copies[id(value)])])
        for module in model.modules()
        if id(module) not in apart
        for attribute, value in module.__dict__.items()
        if is_config(value) and copies[id(value)] is not None
    ]
    try:
        for holding in held:
            holding.module.__dict__[holding.attribute] = holding.copy
    except BaseException:  # an interrupt too: all of them or none
        put_back(held)
        raise
    return held


def put_back(held: list[Holding]) -> None:
    """Every module holds what it held; what was set in a copy since, such as a new vocabulary's size, goes to its original."""
    copies = {id(holding.copy): holding for holding in held}
    for holding in copies.values():
        for word, value in list(holding.copy.__dict__.items()):
            changed = word not in holding.before or holding.before[word] is not value
            if changed and word not in _OURS:
                inner = copies.get(id(value))
                holding.original.__dict__[word] = value if inner is None else inner.original
    for holding in held:
        if holding.module.__dict__.get(holding.attribute) is holding.copy:
            holding.module.__dict__[holding.attribute] = holding.original


def refuse_within_a_block(subject: str, model: nn.Module, *, of: int | None = None) -> None:
    """`InvalidInput` where `model` runs a variant for the length of a block, of a thread other than `of`, that is still open."""
    for config in configs_of(model):
        name = (config.__dict__.get(_NAME) or "").removesuffix(ADDITIVE)
        if name in _blocks and _blocks[name] != of:
            whose = "" if of is None else " in another thread"
            raise InvalidInput(
                f"{subject}: {type(model).__name__} runs a variant for the length of a using() block{whose}, which puts back what was "
                "there before it when it ends; leave the block first"
            )


@contextmanager
def chosen(
    model: PreTrainedModel,
    implementation: str,
    function: Callable[..., Any],
    layers: Mapping[str, nn.Module],
    others: Collection[nn.Module] = (),
) -> Iterator[None]:
    """`function` in `layers` for the length of the block, and what was there put back after it."""
    held: list[Holding] = []
    try:
        _blocks[implementation] = threading.get_ident()
        put(implementation, function)
        held = choose(model, implementation, list(layers.values()), others)
        yield
    finally:
        put_back(held)
        take(implementation)
        _blocks.pop(implementation, None)


def _named(model: PreTrainedModel, layers: Collection[nn.Module]) -> set[int]:
    """The configs that shall name our implementation: those of `layers`, and of what holds a layer, which makes its mask."""
    inside = {id(layer) for layer in layers}
    for layer in layers:
        if not any(is_config(value) for value in layer.__dict__.values()):
            raise InvalidInput(
                f"{type(layer).__name__} in {type(model).__name__} holds no config, by which transformers chooses an implementation; "
                "no variant can be put there"
            )
    return {
        id(value)
        for module in model.modules()
        if any(id(part) in inside for part in module.modules())
        for value in module.__dict__.values()
        if is_config(value)
    }


def _check_masks(model: PreTrainedModel, configs: Collection[Any]) -> None:
    """`InvalidInput` where layers that are left share masks that only their own implementation understands."""
    for name in {config._attn_implementation for config in configs}:
        if not (is_ours(name) or name in (None, "eager", "sdpa", "paged|eager")):
            raise InvalidInput(
                f"{type(model).__name__}: some of its attention is left as it is, and that shares masks of the form that {name!r} "
                'reads alone; call model.set_attn_implementation("sdpa") first, or swap every layer'
            )


def _copy(config: Any, named: set[int], implementation: str, copies: dict[int, Any]) -> Any:
    """A copy that shares every value but the configs within it, and None where neither it nor those are named."""
    if id(config) in copies:
        return copies[id(config)]
    copies[id(config)] = new = object.__new__(type(config))
    new.__dict__.update(config.__dict__)
    touched = id(config) in named
    for word, value in config.__dict__.items():
        if is_config(value) and (inner := _copy(value, named, implementation, copies)) is not None:
            new.__dict__[word] = inner
            touched = True
    if id(config) in named:
        additive = (config._attn_implementation or "eager").endswith(("eager", ADDITIVE))
        new.__dict__[_NAME] = implementation + ADDITIVE * additive
    if not touched:
        copies[id(config)] = None
    return copies[id(config)]
