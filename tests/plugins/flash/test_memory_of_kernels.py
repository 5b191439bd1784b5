"""What the kernels' calls allocate, forward and backward, counted: it grows with the length, for every feature.

What is allocated does not depend on what kernels compute, so the launches are left out and lengths can be those of real use.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.conformance.checks._watching import DispatchMode

LENGTH, HEADS, WIDTH = 8192, 2, 32


class Allocated(DispatchMode):
    """While active, counts the bytes of each storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and (address := x.untyped_storage().data_ptr()) not in before | self.seen.keys():
                self.seen[address] = x  # held, so that no address is used twice
                self.bytes += x.untyped_storage().nbytes()
        return result


def asked(what: str, n: int) -> dict[str, Any]:
    ids = torch.arange(n)[None] // 100
    return {
        "nothing": {},
        "causal": {"causal": True},
        "window": {"window": (100, 100)},
        "key_mask": {"key_mask": torch.ones(1, n, dtype=torch.bool)},
        "lengths": {"key_lengths": torch.tensor([n - 1]), "query_lengths": torch.tensor([n - 3])},
        "segments": {"segments": (ids, ids), "causal": True},
        "bias of keys": {"bias": torch.randn(1, HEADS, 1, n, requires_grad=True)},
        "bias of queries": {"bias": torch.randn(1, HEADS, n, 1, requires_grad=True)},
        "softcap, sinks, dropout": {"softcap": 9.0, "sinks": torch.randn(HEADS), "dropout_p": 0.1},
        "lse": {"need_lse": True},
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "causal",
        "window",
        "key_mask",
        "lengths",
        "segments",
        "bias of keys",
        "bias of queries",
        "softcap, sinks, dropout",
        "lse",
    ],
)
def test_twice_the_length_takes_twice_the_memory(what: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab_plugins.flash import launch, passes

    launched: list[Any] = []
    for module in (launch, passes):
        monkeypatch.setattr(module, "run_kernel", lambda kernel, *rest, **arguments: launched.append(kernel))
    flash = make(num_heads=HEADS, head_dim=WIDTH)

    def allocated(n: int) -> int:
        inputs = [torch.randn(1, HEADS, n, WIDTH, requires_grad=True) for _ in range(3)]
        arguments = asked(what, n)
        with Allocated() as mode:
            result = flash(*inputs, **arguments)
            (result.out.sum() + (0 if result.lse is None else result.lse.sum())).backward()
        return mode.bytes

    first, second = allocated(LENGTH), allocated(2 * LENGTH)
    assert len(launched) >= 2 * 4  # the forward, delta, and two gradients at each length
    assert first >= 4 * 4 * LENGTH * HEADS * WIDTH  # the output and three gradients: what counts is counted
    assert second <= 2.1 * first
    assert second < 20 * 4 * 2 * LENGTH * HEADS * WIDTH  # and in all it is a few times the inputs, L^2 is 256 times
