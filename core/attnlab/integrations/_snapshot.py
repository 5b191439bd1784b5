"""Snapshots of a model: after an operation that failed, or that only looked, every module and config is as before. Needs torch.

transformers is not imported here: its configs are known once that library is in the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, set, list)


class Snapshot:
    """The attributes of every module and config of `model`; `put_back` makes them what they were.

    Attributes are kept by reference, and the contents of the dicts, lists and sets among them (children, parameters, hooks) too.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = [*model.modules(), *configs_of(model)]
        self._kept = [(owner, dict(owner.__dict__), _contents(owner)) for owner in owners]

    def put_back(self) -> None:
        for owner, attributes, contents in self._kept:
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
            for container, content in contents:
                container.clear()
                getattr(container, "extend" if isinstance(container, list) else "update")(content)


@contextmanager
def unless_it_fails(model: nn.Module) -> Iterator[None]:
    """A block that changes all it wants of `model`, or, whatever ends it early, an interrupt too, nothing."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.put_back()
        raise


@contextmanager
def looking_on(model: nn.Module) -> Iterator[None]:
    """A block that runs `model` in eval mode and without gradients, and after which it is as before, with torch's random state.

    The same numbers are drawn in each such block. Buffers that the model writes to in place get their contents back.
    """
    before = Snapshot(model)
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in _buffers(model)]
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(cuda), torch.no_grad():
            torch.manual_seed(0)
            nn.Module.eval(model)
            yield
    finally:
        before.put_back()
        with torch.no_grad():
            for buffer, version, content in buffers:
                if buffer._version != version:
                    buffer.copy_(content)


def _buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in model.buffers() if not buffer.is_inference()]


def configs_of(model: nn.Module) -> list[Any]:
    """Every config of transformers that a module of `model` holds, and every one within those."""
    results: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            _collect(value, results)
    return list(results.values())


def is_config(value: object) -> bool:
    theirs = sys.modules.get("transformers.configuration_utils")
    return theirs is not None and isinstance(value, theirs.PreTrainedConfig)


def _collect(value: Any, result: dict[int, Any]) -> None:
    if is_config(value) and id(value) not in result:
        result[id(value)] = value
        for inner in value.__dict__.values():
            for one in inner if isinstance(inner, (list, tuple)) else [inner]:
                _collect(one, result)


def _contents(owner: Any) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in owner.__dict__.values() if isinstance(value, _CONTAINERS)]
