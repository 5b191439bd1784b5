"""A variant in every layer of a model for the length of a block, with proof that every layer called it. Needs transformers."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlab.errors import AttnlabError, InvalidInput
from attnlab.integrations.transformers.configs import chosen, refuse_within_a_block
from attnlab.integrations.transformers.function import Callee, ModelFunction, Source
from attnlab.integrations.transformers.layers import attention_layers, deaf_layers
from attnlab.integrations.transformers.shared_instances import by_name
from attnlab.interface import Attention
from attnlab.layers.choice import choice, in_words

_numbers = itertools.count()


class Swap:
    """What `using` yields: how often each layer, by path, called the variant. `verify()` proves that all did.

    left: paths of pooling heads that compute their attention themselves and keep it.
    """

    def __init__(self, variant: str, layers: list[str], left: Sequence[str] = ()) -> None:
        self.variant = variant
        self.layers = layers
        self.left = tuple(left)
        self.calls: Counter[str] = Counter()
        self._ran: set[str] = set()  # layers, and the modules around them, whose forward ran

    def verify(self) -> None:
        """Raise `AttnlabError` unless every attention layer of the model that took part has called the variant.

        A layer took no part where the module around it ran, by way of another layer, and passed it over: cross-attention without
        another side.
        """
        silent = [path for path in self.layers if path not in self.calls and not self._passed_over(path)]
        if silent:
            raise AttnlabError(
                f"{self.variant}: expected a call from each of the layers {', '.join(self.layers)}, got none from "
                f"{'any' if len(silent) == len(self.layers) else ', '.join(silent)}; run the whole model inside the block"
            )

    def _passed_over(self, path: str) -> bool:
        outer = _around(path, self.layers)
        inside = [other for other in self.layers if other.startswith(f"{outer}.")]
        return path not in self._ran and outer in self._ran and any(other in self.calls for other in inside)


def _around(path: str, layers: Sequence[str]) -> str:
    """The path of the smallest module that holds the layer at `path` and another of `layers`; empty for the model."""
    outer = path
    while outer := outer.rpartition(".")[0]:
        if any(other != path and other.startswith(f"{outer}.") for other in layers):
            return outer
    return ""


@contextmanager
def using(model: PreTrainedModel, variant: str | Mapping[Any, Any]) -> Iterator[Swap]:
    """Run `model` with `variant` in every attention layer, and put back what was there.

    `variant` is a registered name, a config such as `{"name": "sliding_window", "left": 255}`, or a mapping from each layer's path or
    `layer_idx` to its own `Attention`, which learned variants need. Blocks may nest within one thread. Leaving the block without an error verifies that each layer called it.
    Pooling heads that never ask for an implementation keep their own attention and are named in `Swap.left`. Raises `InvalidInput`
    for a mapping that does not fit the layers, for a model other parts of whose attention never ask and for one that is within such a
    block of another thread, `AttnlabError` from
    `Swap.verify`.
    """
    refuse_within_a_block("using", model, of=threading.get_ident())
    layers = attention_layers(model)
    left = [path for path in deaf_layers(model) if _is_in_a_pooling_head(model, path)]
    deaf = [path for path in deaf_layers(model) if path not in left]
    if deaf or not layers:
        raise InvalidInput(
            f"using: {type(model).__name__} computes its attention itself in {', '.join(deaf) or 'every layer'}, and asks "
            "for no implementation there; attnlab.replace may know it"
        )
    source: Source
    if isinstance(variant, str) or "name" in variant:
        result = choice("using", variant, {})
        title, source = in_words(result), by_name(result.pop("name"), result)
    else:
        title = ", ".join(sorted({instance.name for instance in variant.values()}))
        source = _by_layer(layers, variant)
    swap = Swap(title, list(layers), left)
    paths = {id(module): path for path, module in layers.items()}

    def counted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Callee:
        swap.calls[paths[id(module)]] += 1
        return source(module, query, key, value)

    with chosen(model, f"attnlab_swap_{next(_numbers)}", ModelFunction(counted), layers):
        with _noting_what_runs(model, swap):
            yield swap
        swap.verify()


def _is_in_a_pooling_head(model: nn.Module, path: str) -> bool:
    parts = path.split(".")
    around = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any("pool" in type(model.get_submodule(outer)).__name__.lower() for outer in around)


@contextmanager
def _noting_what_runs(model: nn.Module, swap: Swap) -> Iterator[None]:
    watched = {*swap.layers, *(_around(path, swap.layers) for path in swap.layers)} - {""}
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: swap._ran.add(path))
        for path in watched
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_layer(layers: Mapping[str, nn.Module], arguments: Mapping[Any, Attention]) -> Source:
    """Each layer's own instance, `arguments` by paths or by `layer_idx` where those say which."""
    numbers = [getattr(module, "layer_idx", None) for module in layers.values()]
    names: list[Any] = list(layers)
    if any(isinstance(key, int) for key in arguments) and len(set(numbers)) == len(numbers):
        names = numbers
    if set(arguments) != set(names):
        raise InvalidInput(
            f"using: expected one instance for each of the layers {', '.join(map(str, names))}, got "
            f"{', '.join(map(str, arguments))}"
        )
    results = {id(module): arguments[name] for name, module in zip(names, layers.values(), strict=True)}

    def find(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Attention:
        return results[id(module)]

    return find
