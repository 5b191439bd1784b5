"""Whether a device that a variant computes on is here. Needs no torch; asks it where the program has imported it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Where a driver shows itself on Linux: NVIDIA's, in WSL, on Jetson (two generations), AMD's (which torch calls cuda as well).
_CUDA = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/kfd")
_EVERYWHERE = ("cpu", "meta")


def lacking(devices: Sequence[str]) -> str | None:
    """A sentence where a variant computes on none of the devices that are here; None where it does, or where nothing tells.

    devices: those that its row states; a row that states none is given the benefit of the doubt.
    """
    if not devices or any(device in _EVERYWHERE or _may_be_here(device) for device in devices):
        return None
    return (
        f"computes on {' or '.join(devices)} alone, and there is no such device here; "
        "`attnlab doctor` shows the devices"
    )


def _may_be_here(device: str) -> bool:
    torch = sys.modules.get("torch")
    backend = getattr(getattr(torch, "backends", None) if device == "mps" else torch, device, None)
    ask = getattr(backend, "is_available", None)
    if ask is not None:
        return bool(ask())
    if device == "cuda" and sys.platform.startswith("linux"):
        return any(os.path.exists(path) for path in _CUDA)
    return True
