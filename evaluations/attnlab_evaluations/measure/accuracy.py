"""How far an implementation is from its float64 definition, and whether that is too far. Needs torch.

The definitions compute each query row from that row's visible keys alone, so that long inputs are judged row by row: the
edges of tiles always, then all others in an order that is drawn anew for each run, for as long as there is time.
The bound is that of the conformance checks (`attnlab.conformance.compare.tolerances`), on the inputs that are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import UNIT, derived, largest, largest_error
from attnlab_evaluations.measure.costs import forward_cost
from attnlab_evaluations.measure.estimates import sizes
from attnlab_evaluations.tasks.compare.problems import Calls, Part

SCALARS = 4_000_000
"""Numbers of one kind that one definition call may hold: 32 MB in float64, and a few kinds at once."""
SECONDS = 2.0
SMALLEST_TILE, TILE, MOST_TILES = 16, 128, 32


@dataclass(frozen=True)
class Judged:
    """The largest error over the judged rows, where it is, the bound (None: the variant claims no exactness)."""

    worst: float
    bound: float | None
    row: int
    rows: int
    total: int

    @property
    def is_wrong(self) -> bool:
        """Whether the error is beyond the bound; NaN is."""
        return self.bound is not None and not self.worst <= self.bound

    def reason(self) -> str:
        """What is wrong, for a table."""
        return f"error {self.worst:.1e} at query row {self.row} of the measured inputs, the bound is {self.bound:.1e}"


def judge_error(
    calls: Calls,
    *,
    draw: int,
    budget: int = SCALARS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Judged:
    """The largest absolute difference between the outputs and the definition, over all parts and judged rows.

    `draw` seeds the order of the rows that are no edges; those come first, whatever time they take. Queries of absent
    positions count too: they see the keys that are present.
    """
    end, share = clock() + seconds, []
    for n in range(len(calls.parts)):  # each part gets its part of the time that is left
        now = clock()
        share.append(_judge_part(calls, n, draw + n, budget, now + (end - now) / (len(calls.parts) - n), clock))
    if not share:
        return Judged(0.0, None, 0, 0, 0)
    worst = max(share, key=_excess)
    return replace(worst, rows=sum(j.rows for j in share), total=sum(j.total for j in share))


def _excess(judged: Judged) -> float:
    """Orders parts by how wrong they are: NaN first, then by error over bound."""
    size = math.inf if math.isnan(judged.worst) else judged.worst
    return size / judged.bound if judged.bound else size


def _judge_part(calls: Calls, n: int, draw: int, budget: int, end: float, clock: Callable[[], float]) -> Judged:
    part = calls.parts[n]
    with torch.no_grad():
        out = calls.one(n).detach()
    edges = len(tile_edges(part.query.shape[2]))
    exact = _is_held_to_its_definition(calls, n, out)
    low = torch.float32 if part.query.dtype == torch.float64 else part.query.dtype
    worst, where, judged, plain_error, size = 0.0, 0, 0, 0.0, 0.0
    for rows in row_blocks(calls, n, draw, budget):
        if judged >= edges and clock() > end:
            break
        expected = definition_rows(calls, n, rows)
        got = out[:, :, rows.to(out.device)].double().cpu()
        error, at = _largest(got - expected)
        if math.isnan(error) or error > worst:
            worst, where = error, int(rows[at])
        judged += len(rows)
        if math.isnan(worst):
            break
        if exact:
            plain = definition_rows(calls, n, rows, dtype=low)
            plain_error = max(plain_error, largest_error(plain, expected))
            size = max(size, largest(expected))
    limit = _bound(part, plain_error, size) if exact else None
    return Judged(worst, limit, where, judged, part.query.shape[2])


def _is_held_to_its_definition(calls: Calls, n: int, out: Tensor) -> bool:
    """Whether one call may differ from the definition by rounding alone, as the conformance checks ask.

    A variant may give `exact` up with a note that says why, or be random: two calls then differ.
    """
    have = calls.instances[n].capabilities
    if have.exact:
        return True
    if have.notes.get("exact"):
        return False
    with torch.no_grad():
        return have.deterministic or torch.equal(calls.one(n), out)


def _largest(difference: Tensor) -> tuple[float, int]:
    """The largest magnitude and its row (dim 2); NaN is larger than all."""
    if not difference.numel():
        return 0.0, 0
    by_row = difference.abs().nan_to_num(nan=math.inf, posinf=math.inf).amax(dim=(0, 1, 3))
    at = int(by_row.argmax())
    value = float(by_row[at])
    return (math.nan if math.isinf(value) else value), at


def _bound(part: Part, plain_error: float, size: float) -> float:
    """The rule of the conformance checks: twice the plain formula's error, and rounding over all sums."""
    dtype = str(part.query.dtype).removeprefix("torch.")
    low = "float32" if dtype == "float64" else dtype
    measured = plain_error * UNIT[dtype] / UNIT[low]
    if not math.isfinite(measured):
        measured = 0.0
    widths = part.query.shape[3] + part.key.shape[3] + part.value.shape[3]
    terms = widths + 2 * part.query.shape[2] + 2 * part.key.shape[2] + 16
    magnitude = max(size, largest(part.value))
    return 2 * measured + derived(dtype, terms, magnitude)


def tile_edges(length: int) -> Tensor:
    """The rows at which implementations change tiles.

    Both ends, both sides of each power of two and of each size's last whole tile, and both sides of up to 32 tiles of
    128 rows or, in longer inputs, more.
    """
    results = {0, 1, length - 2, length - 1}
    tile = SMALLEST_TILE
    while tile < length:
        last = length // tile * tile
        results |= {tile - 1, tile, tile + 1, last - 1, last}
        tile *= 2
    step = TILE
    while length > MOST_TILES * step:
        step *= 2
    for start in range(step, length, step):
        results |= {start - 1, start}
    return torch.tensor(sorted(row for row in results if 0 <= row < length), dtype=torch.long)


def row_blocks(calls: Calls, n: int, draw: int, budget: int = SCALARS) -> list[Tensor]:
    """All query rows of part `n` in blocks of what one definition call may hold: edges first, then a random order."""
    length = calls.parts[n].query.shape[2]
    edges = tile_edges(length)
    others = torch.ones(length, dtype=torch.bool)
    others[edges] = False
    rest = others.nonzero().flatten()
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(draw))]
    ordered = torch.cat((edges, rest))
    return [block.sort().values for block in torch.split(ordered, rows_at_once(calls, n, budget))]


def rows_at_once(calls: Calls, n: int, budget: int = SCALARS) -> int:
    """How many rows of part `n` one definition call may judge."""
    part, instance = calls.parts[n], calls.instances[n]
    batch, heads, length, width = part.query.shape
    cost = batch * heads * part.key.shape[2] * _a_pair(calls, n)
    if instance.family == "recurrent":  # its definition keeps a whole state for each judged row
        cost = max(cost, batch * heads * width * part.value.shape[3])
    return min(length, max(1, budget // max(1, cost))) or 1


def _a_pair(calls: Calls, n: int) -> int:
    """Numbers that a definition holds for each pair: hidden units where the score has such, or a vector where it is not known."""
    part, instance = calls.parts[n], calls.instances[n]
    batch, heads, _, width = part.query.shape
    cost = forward_cost(instance.formula, **sizes(part), pairs=1, causal=False, options=instance.options)
    return width if cost is None else max(1, cost.special // (batch * heads))


def definition_bytes(calls: Calls, budget: int = SCALARS) -> int:
    """About the bytes that judging takes in float64, rather more than less.

    Keys and values three times, three states a judged row of a recurrence, and six numbers a judged pair:
    six vectors of hidden units where the score has such, or where the formula is not known. Measured from
    128 to 64k tokens, each definition of attnlab's own stays below.
    """
    most = 0
    for n, (part, instance) in enumerate(zip(calls.parts, calls.instances, strict=True)):
        batch, heads, _, width = part.query.shape
        keys, rows = part.key.shape[2], rows_at_once(calls, n, budget)
        copies = 3 * keys * (part.key.shape[3] + part.value.shape[3])
        states = 3 * rows * width * part.value.shape[3] if instance.family == "recurrent" else 0
        most = max(most, 8 * batch * heads * (copies + states + 6 * rows * keys * _a_pair(calls, n)))
    return most


def definition_rows(calls: Calls, n: int, rows: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows `rows` of the definition's output for part `n` in `dtype`, `[B, H, len(rows), Dv]`, on the CPU."""
    from attnlab.formulas import definition_of

    part, instance = _on_cpu(calls.parts[n]), calls.instances[n]
    gates = calls.gates[n]
    batch = part.query.shape[0]
    bias = {} if part.bias is None else {"bias": part.bias.expand(*part.scores_shape)[:, :, rows].to(dtype)}
    with torch.no_grad():
        result = definition_of(instance)(
            part.query[:, :, rows].to(dtype),
            part.key.to(dtype),
            part.value.to(dtype),
            visible=part.visible(rows),
            parameters={
                k: v.detach().cpu().to(dtype if v.is_floating_point() else v.dtype)
                for k, v in instance.state_dict().items()
            },
            options=instance.options,
            scale=None,
            gates={k: v.cpu().to(dtype) for k, v in gates.items()} if gates else None,
            positions=(
                (rows + part.first_position).expand(batch, -1),
                torch.arange(part.key.shape[2]).expand(batch, -1),
            ),
            **bias,
        )
    out: Tensor = result["out"]
    return out


def _on_cpu(part: Part) -> Part:
    segments = None if part.segments is None else (part.segments[0].cpu(), part.segments[1].cpu())
    return replace(
        part,
        query=part.query.cpu(),
        key=part.key.cpu(),
        value=part.value.cpu(),
        key_mask=None if part.key_mask is None else part.key_mask.cpu(),
        bias=None if part.bias is None else part.bias.cpu(),
        segments=segments,
    )
