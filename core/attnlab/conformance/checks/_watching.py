"""Watching the operations that a call runs: how many, and how large their results are. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class hooks carry no types
    """A mode that is never compiled, so that torch need not import its compiler for it: more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Watch(DispatchMode):
    """While active, counts operations (`count`) and keeps the most elements that one result holds (`largest`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.count = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result
