"""How kernels are launched: widths padded, tiles chosen, strides, bounds and precision told. Needs torch and triton.

Nothing here reads the value of a tensor. The work of a call lies in `passes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.engines import Configuration, architecture, is_interpreted, run_kernel
from attnlab_plugins.flash.configurations import configuration, interpreted
from attnlab_plugins.flash.kernels.arguments import Extras, How, Marks, Scoring
from attnlab_plugins.flash.kernels.spans import hull_kernel, span_kernel, summary_kernel
from attnlab_plugins.flash.rules import Rules

LOG2E = 1.4426950408889634
SMALL = Configuration(64, 64, 4, 1)
"""For kernels that read each token once: summaries, hulls, row sums."""


class Problem(NamedTuple):
    """One call: tensors as `Attention.forward` has them, `rules`, and what shapes the weights. seeds: int64 `[1]` with dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    rules: Rules
    scale: float
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seeds: Tensor | None = None

    @property
    def load(self) -> int:
        """How much a tile holds beside products and causal bounds, 0 to 3: the more, the smaller the tiles that fit the registers.

        1: one of token rules (window, key_mask, offsets by item), softcap, dropout, segments. 2: several of these, or a bias.
        3: a mask, or a bias with any of them.
        """
        rules = self.rules
        bounds = (rules.low_number, rules.low, rules.high, rules.key_present, rules.query_present)
        packed = rules.query_segments is not None
        features = (
            packed,
            not packed and any(x is not None for x in bounds),
            self.softcap is not None,
            self.seeds is not None,
        )
        if rules.allowed is not None or (self.bias is not None and any(features)):
            return 3
        return 2 if self.bias is not None else min(sum(features), 2)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter rather than compiled, as was settled when they were imported."""
    return is_interpreted(hull_kernel)


def tiles_for(kernel: str, problem: Problem) -> Configuration:
    """The tile of that kernel ("forward", "query_gradient", "key_gradient", "bias_gradient") for this problem."""
    query = problem.query
    if interpreting():
        return interpreted(max(query.shape[2], problem.key.shape[2]))
    width = max(padded(query.shape[3]), padded(problem.value.shape[3]))
    return configuration(kernel, architecture(query.device), width, query.element_size(), problem.load)


def padded(width: int) -> int:
    """The power of two that holds a head of this width; tensor cores take no fewer than 16."""
    return max(16, int(triton.next_power_of_2(width)))


def strides_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Element strides, 0 along axes that broadcast."""
    if tensor is None:
        return None
    return tuple(0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def wide(*tensors: Tensor | None) -> bool:
    """Whether offsets inside a tile, of at most 256 rows and 256 columns, could pass 31 bits."""
    return any(t is not None and any(s >= 1 << 22 for s in t.stride()) for t in tensors)


def precision(dtype: torch.dtype) -> str:
    """How float32 tiles are multiplied: exactly, unless torch's own products may use tf32."""
    if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"  # of no effect on narrower operands
    return "ieee"


def how(problem: Problem, tiles: Configuration, even: bool, *tensors: Tensor | None) -> How:
    """The compile-time half. even: whether tiles divide the length that the kernel walks; tensors: what it reads by rows."""
    query, value, rules, bias = problem.query, problem.value, problem.rules, problem.bias
    allowed = rules.allowed
    bounds = "number"
    for tensor in (rules.low, rules.high):
        if tensor is not None:
            bounds = "item" if tensor.dim() == 1 else "query"
    return How(
        D=query.shape[3],
        DV=value.shape[3],
        BLOCK_D=padded(query.shape[3]),
        BLOCK_DV=padded(value.shape[3]),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        SIGN=(problem.scale > 0) - (problem.scale < 0),
        BOUNDS=bounds,
        BIAS_PER_ITEM=bias is not None and bias.shape[0] > 1,
        BIAS_PER_HEAD=bias is not None and bias.shape[1] > 1,
        BIAS_PER_QUERY=bias is not None and bias.shape[2] > 1,
        BIAS_PER_KEY=bias is not None and bias.shape[3] > 1,
        ALLOWED_PER_QUERY=allowed is not None and allowed.shape[2] > 1,
        ALLOWED_PER_KEY=allowed is not None and allowed.shape[3] > 1,
        PRECISION=precision(query.dtype),
        EVEN=even,
        WIDE=wide(*tensors, bias, allowed),
        UPCAST=interpreting() and query.dtype == torch.bfloat16,
    )


def common(problem: Problem, hull: Tensor | None, spans: Tensor | None) -> dict[str, Any]:
    """The run-time arguments that every kernel over tiles of pairs takes."""
    query, key, rules, bias = problem.query, problem.key, problem.rules, problem.bias
    allowed = None if rules.allowed is None else rules.allowed.view(torch.uint8)
    size = abs(problem.scale) or 1.0  # where the scale is 0 the queries are
    return {
        "low": rules.low if rules.low_number is None else rules.low_number,
        "high": rules.high if rules.high_number is None else rules.high_number,
        "heads": query.shape[1],
        "group": query.shape[1] // key.shape[1],
        "Lq": query.shape[2],
        "Lk": key.shape[2],
        "marks": Marks(rules.query_segments, rules.key_segments, rules.key_positions, rules.key_present, hull, spans),
        "extras": Extras(bias, strides_of(bias), allowed, strides_of(allowed), problem.seeds),
        "scoring": Scoring(
            size * LOG2E if problem.softcap is None else size,
            None if problem.softcap is None else float(problem.softcap),
            float(problem.dropout_p),
            1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1 else 0.0,
        ),
    }


def hull_of(problem: Problem) -> Tensor | None:
    """int32 `[B, 5]`, see `kernels.spans`; None where all slots are present."""
    rules, device = problem.rules, problem.query.device
    if rules.key_present is None and rules.query_present is None:
        return None
    hull = torch.empty(problem.query.shape[0], 5, dtype=torch.int32, device=device)
    run_kernel(
        hull_kernel,
        (hull.shape[0],),
        SMALL,
        device,
        key_present=rules.key_present,
        query_present=rules.query_present,
        hull=hull,
        Lq=problem.query.shape[2],
        Lk=problem.key.shape[2],
        BLOCK=1024,
    )
    return hull


def spans_of(problem: Problem, tiles: Configuration, of_queries: bool) -> Tensor | None:
    """For each block of queries (or of keys) the range of the other side it may meet, int32 `[B, blocks, 2]`; None without segments."""
    rules, device = problem.rules, problem.query.device
    if rules.query_segments is None or rules.key_segments is None:
        return None
    queries = _summary(rules.query_segments, rules.low, rules.high, tiles.rows)
    keys = _summary(rules.key_segments, rules.key_positions, rules.key_positions, tiles.columns)
    mine, theirs = (queries, keys) if of_queries else (keys, queries)
    spans = torch.empty(*mine.shape[:2], 2, dtype=torch.int32, device=device)
    below, above = rules.low is not None, rules.high is not None
    run_kernel(
        span_kernel,
        (spans.shape[0] * spans.shape[1],),
        SMALL,
        device,
        mine=mine,
        theirs=theirs,
        spans=spans,
        blocks=spans.shape[1],
        others=theirs.shape[1],
        length=problem.key.shape[2] if of_queries else problem.query.shape[2],
        BLOCK=tiles.columns if of_queries else tiles.rows,
        LOW=below if of_queries else above,
        HIGH=above if of_queries else below,
        CHUNK=128,
    )
    return spans


def _summary(ids: Tensor, lows: Tensor | None, highs: Tensor | None, block: int) -> Tensor:
    batch, length = ids.shape
    summary = torch.empty(batch, triton.cdiv(length, block), 4, dtype=torch.int64, device=ids.device)
    run_kernel(
        summary_kernel,
        (batch * summary.shape[1],),
        SMALL,
        ids.device,
        segments=ids,
        lows=lows,
        highs=highs,
        summary=summary,
        length=length,
        BLOCK=block,
    )
    return summary
