"""The registry of this process: read once, replaced by `use_registry`. Needs no torch; `_registry` says how one is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from attnlab.cache import forget_all

if TYPE_CHECKING:
    from attnlab.registry import Registry

_lock = threading.RLock()
_current: Registry | None = None
read: Callable[[], Registry] | None = None  # set by `_registry`, which imports this module


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
