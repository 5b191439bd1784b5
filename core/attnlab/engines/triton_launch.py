"""Where Triton kernels can run, and how they are launched there, interpreted, or compiled ahead for a GPU that is not there.

Needs torch; triton is imported by what takes a kernel, never by the import of this module or by asking where kernels serve.
`TRITON_INTERPRET=1` is Triton's own switch: it is read when a kernel is defined, and here at each call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

OLDEST = (8, 0)
"""The first compute capability with bfloat16 tensor cores, and the first that kernels were compiled for."""
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that one block can have, by architecture (CUDA C programming guide, compute capabilities)."""
_interpreter = threading.Lock()  # Triton's interpreter patches its language while a kernel runs


class Configuration(NamedTuple):
    """A tile of `rows` queries and `columns` keys, for `warps` warps, loads `stages` deep."""

    rows: int
    columns: int
    warps: int
    stages: int


class Ahead(NamedTuple):
    """In place of a GPU: compile for `arch` (90 is sm_90) and hand each compiled kernel to `record(name, tiles, kernel)`."""

    arch: int
    record: Callable[[str, Configuration, Any], None]


_ahead: Ahead | None = None


def kernels_serve(device: str) -> bool:
    """Whether calls on this kind of device go through Triton kernels: CUDA with triton, or CPU in Triton's interpreter.

    Where there is no GPU to ask, CUDA stands for one that is new enough: only tools that plan for one ask then.
    """
    if not _triton_is_there():
        return False
    if device == "cuda":
        return torch.version.hip is None and _gpus_are_new_enough()
    return device == "cpu" and _told_to_interpret()


# torch.compile calls it while it traces and takes the answer as a constant.
kernels_serve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernels_can_run() -> bool:
    """Whether this process has a device that Triton kernels serve."""
    return kernels_serve("cpu") or (torch.cuda.is_available() and kernels_serve("cuda"))


def is_interpreted(kernel: Any) -> bool:
    """Whether this kernel runs in Triton's interpreter rather than compiled, as was settled when it was defined."""
    import triton

    return not isinstance(kernel, triton.JITFunction)


def are_plain(*tensors: Tensor) -> bool:
    """Whether these are tensors and nothing more, outside every trace and transform, so that a kernel may read their memory."""
    if torch.compiler.is_compiling():  # which does not know the rest
        return False
    return (
        all(
            type(x) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_legacy_batchedtensor(x)
            for x in tensors
        )
        and not torch._C._get_tracing_state()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None  # of make_fx
        and torch._C._functorch.maybe_current_level() is None
        and not torch.autograd.forward_ad._current_level >= 0
    )


@contextmanager
def compiling_ahead(ahead: Ahead) -> Iterator[None]:
    """Inside, `run_kernel` compiles for that architecture and runs nothing; for one thread only."""
    global _ahead
    before, _ahead = _ahead, ahead
    try:
        yield
    finally:
        _ahead = before


def architecture(device: torch.device) -> int:
    """What kernels for `device` are compiled for: 90 is sm_90."""
    if _ahead is not None:
        return _ahead.arch
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def run_kernel(
    kernel: Any, grid: tuple[int, ...], tiles: Configuration, device: torch.device, **arguments: Any
) -> None:
    """Launch `kernel` on `device`; an empty grid launches nothing. Options of the compiler may be among the arguments."""
    if not all(grid):
        return
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if _ahead is not None:
        _ahead.record(kernel.fn.__name__, tiles, kernel.warmup(grid=grid, **arguments, **options))
        return
    where: AbstractContextManager[Any] = nullcontext()
    if is_interpreted(kernel):
        where = _interpreter
    elif device.type == "cuda":
        where = torch.cuda.device(device)
    with where:
        kernel[grid](**arguments, **options)


def _told_to_interpret() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@lru_cache(maxsize=1)
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _gpus_are_new_enough() -> bool:
    if not torch.cuda.is_available():
        return True
    return all(torch.cuda.get_device_capability(n) >= OLDEST for n in range(torch.cuda.device_count()))
