"""Where the Triton kernels can run, found out without importing triton. Needs torch; `TRITON_INTERPRET=1` is Triton's own switch."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch

OLDEST = (8, 0)
"""The first compute capability with bfloat16 tensor cores, and the first that the kernels were compiled for."""


def kernels_serve(device: str) -> bool:
    """Whether calls on this kind of device go through the kernels: CUDA with triton, or any in Triton's interpreter.

    Where there is no GPU to ask, CUDA stands for one that is new enough: only tools that plan for one ask then.
    """
    if not _triton_is_there():
        return False
    if device == "cuda":
        return torch.version.hip is None and _gpus_are_new_enough()
    return device == "cpu" and interpreted()


# torch.compile calls it while it traces and takes the answer as a constant.
kernels_serve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernels_can_run() -> bool:
    """Whether this process has a device that the kernels serve."""
    return kernels_serve("cpu") or (torch.cuda.is_available() and kernels_serve("cuda"))


def interpreted() -> bool:
    """Whether Triton is told to interpret its kernels, which it does on CPU tensors too, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@lru_cache(maxsize=1)
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=1)
def _gpus_are_new_enough() -> bool:
    if not torch.cuda.is_available():
        return True
    return all(torch.cuda.get_device_capability(n) >= OLDEST for n in range(torch.cuda.device_count()))
