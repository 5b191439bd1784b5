"""The Triton kernels on CPU tensors, in Triton's interpreter: as slow as it sounds, so the inputs are small."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

NO_TRITON = (
    "triton is not installed; it comes with torch's CUDA builds, and its interpreter needs no GPU "
    "(pip install triton==3.7.1 beside torch 2.13)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the interpreter is part of the full tests only: `make test` has no triton."""
    for item in items:
        if "interpreter" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on CPU tensors go through the kernels, interpreted."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from attnlab_plugins.flash import launch

    if not launch.interpreting():
        pytest.skip("the kernels were imported compiled in this process: run these tests in one of their own")
    with _hurried():
        yield


@pytest.fixture
def make(interpreter: None) -> Any:
    """`make(**sizes)`: an instance whose calls go through the kernels."""
    from attnlab_plugins.flash.variant import FlashAttention

    return FlashAttention


class _hurried:
    """Without what the interpreter does for kernels that may be wrong, three quarters of its time.

    It patches triton's language anew for each function that a kernel calls, and checks each sum of integers for overflow.
    Where a release of triton keeps these elsewhere, nothing is changed.
    """

    def __enter__(self) -> None:
        import triton.runtime.interpreter as inside

        self.undo: list[Any] = []
        if not all(hasattr(inside, n) for n in ("_patch_lang", "interpreter_builder", "InterpreterOptions")):
            return
        builder, real = inside.interpreter_builder, inside._patch_lang
        patched: set[int] | None = None

        class Nothing:
            def restore(self) -> None:
                pass

        def once(function: Any) -> Any:
            nonlocal patched
            key = id(function.__globals__)
            if patched is not None:
                if key in patched:
                    return Nothing()
                patched.add(key)
                return real(function)
            patched = {key}
            scope = real(function)
            restore = scope.restore

            def done() -> None:
                nonlocal patched
                patched = None
                restore()

            scope.restore = done
            return scope

        options = builder.options
        self.undo = [(inside, "_patch_lang", real), (builder, "options", options)]
        inside._patch_lang = once
        builder.options = inside.InterpreterOptions(sanitize_overflow=False)

    def __exit__(self, *error: object) -> None:
        for holder, name, value in self.undo:
            setattr(holder, name, value)
