"""Absent slots outside the mask: gates closed at absent keys, rows of absent queries emptied. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnlab.call import AttentionOutput
from attnlab.capabilities import GateSpec


def close_gates(
    gates: Mapping[str, Tensor], specs: Mapping[str, GateSpec], absent: Tensor
) -> dict[str, Tensor]:
    """Gates with absent slots set to the value that changes nothing; absent is `[B, 1, L, 1]`."""
    return {
        name: gate.masked_fill(absent if gate.dim() == 4 else absent[..., 0], specs[name].absent)
        for name, gate in gates.items()
    }


def without_absent_queries(result: AttentionOutput, present: Tensor) -> AttentionOutput:
    absent = ~present[:, None, :]  # [B, 1, Lq]
    return AttentionOutput(
        result.out.masked_fill(absent[..., None], 0),
        None if result.weights is None else result.weights.masked_fill(absent[..., None], 0),
        None if result.lse is None else result.lse.masked_fill(absent, -torch.inf),
        result.state,
    )
