"""Values in masks, judged where looking at them is free: lengths, segment ids and offsets of tensors on the CPU. Needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.errors import InvalidInput

if TYPE_CHECKING:
    from attnlab.visibility.mask import AttentionMask

_FEW = 64  # numbers that are quicker to list than to reduce
_FURTHEST = 1 << 62  # an offset beyond it leaves the range of int64 once a position is added


def check_values(
    mask: AttentionMask, query_length: int, key_length: int, subject: str, *, everywhere: bool = False
) -> None:
    """`InvalidInput` for lengths outside `[0, L]`, segment ids below -1 and offsets that overflow; lengths count the call's own tokens.

    Tensors on other devices, where looking would wait for the device, are looked at only with `everywhere`; in graphs, under transforms
    and in fake tensors there is nothing to look at.
    """
    if torch.compiler.is_compiling():
        return
    for name, lengths, limit in (
        ("key_lengths", mask.key_lengths, key_length),
        ("query_lengths", mask.query_lengths, query_length),
    ):
        if lengths is not None and (ends := _ends(lengths, everywhere)) is not None:
            low, high = ends
            if low < 0 or high > limit:
                wrong = low if low < 0 else high
                raise InvalidInput(
                    f"{subject}: {name} must lie in 0 to {limit}, the length of the call's tensors, got {wrong}; clip them, or pad the tensors"
                )
    for part, ids in zip(("query_ids", "key_ids"), mask.segments or (), strict=False):
        if (ends := _ends(ids, everywhere)) is not None and ends[0] < -1:
            raise InvalidInput(
                f"{subject}: segments {part} must be 0 or more, or -1 for an absent token, got {ends[0]}"
            )
    offset = mask.offset
    if isinstance(offset, (Tensor, int)):
        ends = _ends(offset, everywhere) if isinstance(offset, Tensor) else (offset, offset)
        if ends is not None and (ends[0] < -_FURTHEST or ends[1] > _FURTHEST):
            wrong = ends[0] if ends[0] < -_FURTHEST else ends[1]
            raise InvalidInput(f"{subject}: offset must lie in -2^62 to 2^62, got {wrong}")


def _ends(values: Tensor, everywhere: bool) -> tuple[int, int] | None:
    """The least and the largest number; None where there is none, or none to be looked at."""
    if not _readable(values) or not (values.is_cpu or everywhere) or not values.numel():
        return None
    if values.numel() <= _FEW:
        numbers = values.flatten().tolist()
        return min(numbers), max(numbers)
    low, high = torch.aminmax(values)
    return int(low), int(high)


def _readable(values: Tensor) -> bool:
    """Whether it has numbers: no fake tensor, no trace, no batch of a transform."""
    modes = torch._C._TorchDispatchModeKey
    return (
        type(values) in (Tensor, torch.nn.Parameter)
        and not values.is_meta
        and not torch._C._functorch.is_legacy_batchedtensor(values)
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
        and torch._C._get_dispatch_mode(modes.FAKE) is None
        and torch._C._get_dispatch_mode(modes.PROXY) is None
    )
