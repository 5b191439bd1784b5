"""Process-wide settings, read and set back. Needs torch; used by checks of calls that must leave them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attnlab.conformance.compare.messages import demand
from attnlab.conformance.oracle.cases import Case

RESTORE = (
    "Settings belong to the caller: pass the choice on as an argument, or restore what was there in a finally block; "
    "what is one switch for the process cannot be turned for one call, as calls in other threads meet it"
)

_kernels: Any = torch.backends.cuda  # whose functions carry no types

SETTINGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "deterministic mode": torch.get_deterministic_debug_mode,
    "the number of threads": torch.get_num_threads,
    "gradient mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly mode": torch.is_anomaly_enabled,
    "autocast on the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "autocast on CUDA": lambda: torch.is_autocast_enabled("cuda"),
    "the fused kernels that torch may take": lambda: (
        _kernels.flash_sdp_enabled(),
        _kernels.mem_efficient_sdp_enabled(),
        _kernels.math_sdp_enabled(),
    ),
}


@contextmanager
def settings_kept(variant: Any, case: Case, when: str) -> Iterator[None]:
    """Fail where anything in `SETTINGS` differs after what runs inside; set back in any case."""
    before = {n: read() for n, read in SETTINGS.items()}
    try:
        yield
    finally:
        after = {n: read() for n, read in SETTINGS.items()}
        _restored(before)
    changed = [f"{n} (from {x} to {after[n]})" for n, x in before.items() if after[n] != x]
    demand(not changed, variant, case, f"{when} changed {', '.join(changed)}", RESTORE)


def _restored(before: dict[str, Any]) -> None:
    """What a broken variant changed, set back, so that the checks after this one are judged fairly."""
    torch.set_default_dtype(before["the default dtype"])
    torch.set_float32_matmul_precision(before["the precision of float32 products"])
    torch.set_deterministic_debug_mode(before["deterministic mode"])
    torch.set_num_threads(before["the number of threads"])
    torch.set_grad_enabled(before["gradient mode"])
    torch.autograd.set_detect_anomaly(before["anomaly mode"])
    torch.set_autocast_enabled("cpu", before["autocast on the CPU"])
    torch.set_autocast_enabled("cuda", before["autocast on CUDA"])
    flash, efficient, math = before["the fused kernels that torch may take"]
    _kernels.enable_flash_sdp(flash)
    _kernels.enable_mem_efficient_sdp(efficient)
    _kernels.enable_math_sdp(math)


@contextmanager
def deterministic_mode(mode: str) -> Iterator[None]:
    """torch.set_deterministic_debug_mode inside; use_deterministic_algorithms() would import the compiler."""
    was = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode(mode)
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
