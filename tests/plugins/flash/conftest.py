"""The flash kernels on CPU tensors, in Triton's interpreter: as slow as it sounds, so the inputs are small."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def interpreter(interpreter: None) -> None:
    """Calls of flash on CPU tensors go through its kernels, interpreted."""
    from attnlab_plugins.flash import launch

    if not launch.interpreting():
        pytest.skip("the kernels were imported compiled in this process: run these tests in one of their own")


@pytest.fixture
def make(interpreter: None) -> Any:
    """`make(**sizes)`: an instance whose calls go through the kernels."""
    from attnlab_plugins.flash.variant import FlashAttention

    return FlashAttention
