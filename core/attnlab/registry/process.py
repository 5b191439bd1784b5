"""The registry of this process: read once, replaced by `use_registry`. Needs no torch; `_registry` says how one is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from attnlab.cache import forget_all
from attnlab.errors import AttnlabError

if TYPE_CHECKING:
    from attnlab.registry import Registry

_lock = threading.RLock()
_current: Registry | None = None
read: Callable[[], Registry] | None = None  # set by `_registry`, which imports this module


class Maker:
    """The registry that made a variant, which its refusals ask for variants that could serve.

    A copy of the variant has the same; in a pickle it stands for the registry of the process that loads it, which is read when asked.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry

    def declaring(self, formula: str, features: tuple[str, ...], dtype: str, device: str) -> list[str]:
        """`Registry.declaring`; no names if the registry's files cannot be read, which is reported where they are used."""
        try:
            registry = default_registry() if self._registry is None else self._registry
            return registry.declaring(formula, features, dtype, device)
        except AttnlabError:
            return []

    # `torch.compile` takes the result for a constant: what `torch.compiler.assume_constant_result` sets, without torch.
    declaring._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: object) -> Maker:
        return self

    def __reduce__(self) -> tuple[type[Maker], tuple[()]]:
        return Maker, ()


def default_registry() -> Registry:
    """The process's registry: installed packages', the user's and the project's files, read once."""
    global _current
    with _lock:
        if _current is None:
            assert read is not None
            _current = read()
        return _current


def use_registry(registry: Registry | None) -> None:
    """Make `registry` the default of this process; None reads the layers anew at next use."""
    global _current
    with _lock:
        _current = registry
    forget_all()
