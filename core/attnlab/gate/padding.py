"""What is not there: gates closed at absent keys, rows of absent queries emptied, calls without tokens. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import GateSpec
from attnlab.engines.triton_launch import are_plain
from attnlab.state.origin import pass_on

if TYPE_CHECKING:
    from attnlab.interface import Attention


_zero: Tensor | None = None  # on the CPU and of no dtype's own: what it stands beside decides


def without_absent(key: Tensor, value: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros where `absent`, each in one pass where `masked_fill` takes two."""
    global _zero
    if not are_plain(key, value, absent):  # a trace or a mode would not know the zero
        return key.masked_fill(absent, 0), value.masked_fill(absent, 0)
    if _zero is None:
        _zero = torch.zeros((), device="cpu")
    return torch.where(absent, _zero, key), torch.where(absent, _zero, value)


def close_gates(gates: Mapping[str, Tensor], specs: Mapping[str, GateSpec], absent: Tensor) -> dict[str, Tensor]:
    """Gates with absent slots set to the value that changes nothing; absent is `[B, 1, L, 1]`."""
    return {
        name: gate.masked_fill(absent if gate.dim() == 4 else absent[..., 0], specs[name].absent)
        for name, gate in gates.items()
    }


def without_absent_queries(result: AttentionOutput, present: Tensor, zeroed: bool) -> AttentionOutput:
    """zeroed: whether weights are 0 there already; a copy of them would be no part of the output's graph."""
    absent = ~present[:, None, :]  # [B, 1, Lq]
    weights = result.weights
    return AttentionOutput(
        result.out.masked_fill(absent[..., None], 0),
        weights if weights is None or zeroed else weights.masked_fill(absent[..., None], 0),
        None if result.lse is None else result.lse.masked_fill(absent, -torch.inf),
        result.state,
    )


def empty_output(
    variant: Attention, query: Tensor, key: Tensor, value: Tensor, call: Call, total: int
) -> AttentionOutput:
    """Nothing to see or nobody to see it: zeros (or nothing) of the right shape, with gradients that flow."""
    batch, heads, lq, _ = query.shape
    anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()  # 0, in the graph
    out = query.new_zeros(batch, heads, lq, variant.value_dim) + anchor
    weights = None
    if call.need_weights:  # in the graph of the output, as they are elsewhere
        weights = query.new_zeros(batch, heads, lq, total) + anchor
        out = out + weights.sum()
    lse = None
    if call.need_lse:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.full((batch, heads, lq), -torch.inf, dtype=wide, device=query.device)
    state = call.state
    if state is not None:
        following = variant.absorb(key, value, call) if key.shape[2] else state.renewed()
        state.spend(variant.name)
        pass_on(variant, state, following)
        state = following
    return AttentionOutput(out, weights, lse, state)
