"""Peak extra memory of one call, and the memory that is free. Needs torch; used by runs and targets.

What is measured: the highest sum of bytes that torch's allocator had handed out during the call and
not yet got back, counted from the call's start; its result is included, its inputs are not. On the CPU
torch's profiler reports every allocation, also those inside fused kernels; this works alike on
Linux, macOS and Windows and gives the same number each time. On Linux it was compared with the
growth of the process's peak resident memory (VmHWM reset before the call): equal within 3% from
3 MiB on. What it cannot see is scratch that a library takes from the system behind torch's back. On
CUDA it is `max_memory_allocated`, reset before each call.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def peak_of(changes: Iterable[int]) -> int:
    """The highest running sum of signed byte counts in time order, at least 0."""
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def peak_extra_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """Peak extra bytes during `call()`; see the module's docstring for what is counted."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        torch.cuda.synchronize(device)
        del kept
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    # The profiler's C++ part otherwise prints two lines to stderr at each use; it reads this once.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        ) as visible:
            kept = call()
    events: list[Any] = [e for e in visible.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    del kept
    return peak_of(e.nbytes() for e in events)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    words = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(w in str(error) for w in words)


def free_bytes(device: str = "cpu") -> int | None:
    """Bytes that a new allocation may hope for, a container's own limit included; None where unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if sys.platform == "win32":
        return _windows_free()
    result = _meminfo_available(Path("/proc/meminfo"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            room = int(Path(limit).read_text()) - int(Path(used).read_text())
            result = room if result is None else min(result, room)
    if result is None:
        with suppress(OSError, ValueError, AttributeError):  # macOS: what is installed is an upper bound
            result = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return result


def _meminfo_available(path: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _windows_free() -> int | None:
    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong)
            for name in ("total", "free", "total_page", "free_page", "total_virtual", "free_virtual", "extended")
        ]

    status = Status()
    status.length = ctypes.sizeof(status)
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.free)
