"""A recurrence over tokens, one at a time, in memory that grows with the square root of what a plain loop keeps. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attnlab.engines.recomputing import recomputed

SEGMENT = 64

Update = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]
Read = Callable[[Tensor, Tensor], Tensor]


def scan_recurrence(
    memory: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gates: Mapping[str, Tensor],
    present: Tensor | None,
    update: Update,
    read: Read,
    *,
    recording: bool,
) -> tuple[list[Tensor], Tensor]:
    """Feed tokens in order: `([read(S_t, q_t) for each t], S_L)`; query None reads nothing.

    key, value `[B, Hkv, L, *]`; query `[B, Hkv, G, L, Dq]`; gates `[B, Hkv, L]` or `[B, Hkv, L, Dk]`; present bool `[B, L]`
    or None: a padded token leaves the memory as it was. While autograd records, segments are recomputed in backward.
    """
    length = key.shape[2]

    def run(memory: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        outs = []
        for t in range(start, stop):
            following = update(memory, key[:, :, t], value[:, :, t], {n: g[:, :, t] for n, g in gates.items()})
            if present is not None:
                following = torch.where(present[:, t].view(-1, *[1] * (memory.dim() - 1)), following, memory)
            memory = following
            if query is not None:
                outs.append(read(memory, query[:, :, :, t : t + 1]))
        return (memory, *outs)

    outs: list[Tensor] = []
    segmented = recording and length > SEGMENT
    for start in range(0, length, SEGMENT):
        stop = min(start + SEGMENT, length)
        made = recomputed(run, memory, start, stop) if segmented else run(memory, start, stop)
        memory = made[0]
        outs.extend(made[1:])
    return outs, memory
