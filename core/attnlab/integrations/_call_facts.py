"""What a hook knows of a call under way, for code inside that call: never kept on a module, which other calls share. Needs torch."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

_Stack = tuple[tuple[nn.Module, Any], ...]


class FactsOfCalls:
    """A stack of `(module, facts)` for each thread (and each task of an event loop): calls that overlap do not meet.

    `push` in a forward pre-hook, `pop` in a forward hook with `always_call=True`; between the two, also where the module is
    called again within its own call, `of` gives the facts of the innermost call.

    Graphs of `torch.compile` know no context variables: while one is traced the facts pass from hook to hook as values of the
    graph. Where such a graph breaks between the two, the facts wait in this object, and calls from several threads would meet.
    """

    def __init__(self, name: str) -> None:
        self._running: ContextVar[_Stack] = ContextVar(name, default=())
        self._traced: _Stack = ()

    def push(self, module: nn.Module, facts: Any) -> None:
        """Note the facts of the call of `module` that begins."""
        if torch.compiler.is_compiling():
            # A call that ended within a broken graph, by an error, has left its own behind.
            self._traced = (*(pair for pair in self._traced if pair[0] is not module), (module, facts))
        else:
            self._running.set((*self._running.get(), (module, facts)))

    def of(self, module: nn.Module) -> Any:
        """The facts of the innermost call of `module` under way; None where there are none."""
        for running, facts in reversed(self._stack()):
            if running is module:
                return facts
        return None

    def pop(self, module: nn.Module) -> Any:
        """Forget the innermost call of `module`, and what calls within it left behind; its facts, None where there are none."""
        stack = self._stack()
        for at in reversed(range(len(stack))):
            if stack[at][0] is module:
                if torch.compiler.is_compiling() or not self._running.get():
                    self._traced = stack[:at]
                else:
                    self._running.set(stack[:at])
                return stack[at][1]
        return None

    def _stack(self) -> _Stack:
        if torch.compiler.is_compiling():
            return self._traced
        # A graph that broke between the hooks has left its facts with the traced ones.
        return self._running.get() or self._traced
