"""Bounded caches of what earlier calls settled, and the one place that empties them. Imports no torch.

They hold instances made by name, functions of requests that were validated before, and masks resolved for the shapes of a call.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

_lock = threading.Lock()  # between a look at a generation and the entry that depends on it


class BoundedCache(dict[Any, Any]):
    """A dict of at most `limit` entries, which is emptied when it is full and by `forget_all`.

    `generation` counts the calls of `forget_all`, so that an entry computed before one of them is not stored after it.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self.limit, self.generation = limit, 0
        with _lock:
            _caches.add(self)

    def put(self, key: Any, value: object, generation: int | None = None) -> None:
        """Store `value`, unless `forget_all` was called since `generation`."""
        with _lock:
            if generation is not None and generation != self.generation:
                return
            if len(self) >= self.limit:
                self.clear()
            self[key] = value


_caches: WeakSet[BoundedCache] = WeakSet()


def forget_all() -> None:
    """Empty every cache: a name of a variant may mean something else from now on."""
    with _lock:
        for cache in list(_caches):
            cache.generation += 1
            cache.clear()
