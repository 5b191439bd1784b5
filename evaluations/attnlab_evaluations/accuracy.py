"""How far an implementation is from its float64 definition. Needs torch.

The definitions compute each query row from that row's visible keys alone, so long inputs are judged on
a sample of rows: the first, the last and evenly spread ones between.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab_evaluations.costs import forward_cost
from attnlab_evaluations.estimates import sizes
from attnlab_evaluations.problems import Calls, Part

SCALARS = 20_000_000
"""Numbers that one definition call may hold: 160 MB in float64."""
FEWEST = 3
"""Rows that are judged whatever they cost: the first, the middle and the last."""


def rows_of(length: int, cost_per_row: int, budget: int) -> Tensor:
    """The query rows to judge: all where they fit `budget`, else an even spread with both ends."""
    count = min(length, max(FEWEST, budget // max(1, cost_per_row)))
    if count >= length:
        return torch.arange(length)
    return torch.linspace(0, length - 1, count, dtype=torch.float64).round().long().unique()


def worst_error(calls: Calls, *, budget: int = SCALARS) -> float:
    """The largest absolute difference between the outputs and the definition, over all parts and judged rows.

    Queries of absent positions count too: they see the keys that are present. A NaN anywhere gives NaN.
    """
    return max((_part_error(calls, n, budget) for n in range(len(calls.parts))), default=0.0)


def _part_error(calls: Calls, n: int, budget: int) -> float:
    with torch.no_grad():
        out = calls.one(n)
    rows = judged_rows(calls, n, budget)
    wanted = definition_rows(calls, n, rows)
    difference = (out[:, :, rows.to(out.device)].double().cpu() - wanted).abs()
    if difference.isnan().any():
        return float("nan")
    return float(difference.max()) if difference.numel() else 0.0


def judged_rows(calls: Calls, n: int, budget: int = SCALARS) -> Tensor:
    """The query rows of part `n` that are judged."""
    part = calls.parts[n]
    batch, heads, length, width = part.query.shape
    # A recurrence's definition keeps a whole state for each judged row, a score's one vector for each pair.
    held = width * part.value.shape[3] if calls.instances[n].family == "recurrent" else width
    return rows_of(length, batch * heads * part.key.shape[2] * held, budget)


def definition_bytes(calls: Calls, budget: int = SCALARS) -> int:
    """About the bytes that judging takes in float64, rather more than less.

    Keys and values three times, three states a judged row of a recurrence, and five numbers a judged pair:
    five vectors of hidden units where the score has such, or where the formula is not known. Measured from
    128 to 64k tokens, each definition of attnlab's own stays below.
    """
    most = 0
    for n, (part, instance) in enumerate(zip(calls.parts, calls.instances, strict=True)):
        batch, heads, _, width = part.query.shape
        keys, rows = part.key.shape[2], len(judged_rows(calls, n, budget))
        cost = forward_cost(instance.formula, **sizes(part), pairs=1, causal=False, options=instance.options)
        a_pair = width if cost is None else max(1, cost.special // (batch * heads))
        copies = 3 * keys * (part.key.shape[3] + part.value.shape[3])
        states = 3 * rows * width * part.value.shape[3] if instance.family == "recurrent" else 0
        most = max(most, 8 * batch * heads * (copies + states + 5 * rows * keys * a_pair))
    return most


def definition_rows(calls: Calls, n: int, rows: Tensor) -> Tensor:
    """Rows `rows` of the definition's float64 output for part `n`, `[B, H, len(rows), Dv]`, on the CPU."""
    from attnlab.formulas import definition_of

    part, instance = _on_cpu(calls.parts[n]), calls.instances[n]
    gates = calls.gates[n]
    batch = part.query.shape[0]
    visible = part.visible(rows)
    with torch.no_grad():
        found = definition_of(instance)(
            part.query[:, :, rows].double(),
            part.key.double(),
            part.value.double(),
            visible=visible,
            parameters={k: v.detach().double().cpu() for k, v in instance.state_dict().items()},
            options=instance.options,
            scale=None,
            gates={k: v.double().cpu() for k, v in gates.items()} if gates else None,
            positions=(rows.expand(batch, -1), torch.arange(part.key.shape[2]).expand(batch, -1)),
        )
    out: Tensor = found["out"]
    return out


def _on_cpu(part: Part) -> Part:
    mask = None if part.key_mask is None else part.key_mask.cpu()
    return replace(part, query=part.query.cpu(), key=part.key.cpu(), value=part.value.cpu(), key_mask=mask)
