"""Analytic FLOPs and bytes of one attention call, by formula. Needs only the standard library.

Conventions: a multiply-add is 2 FLOPs; a reciprocal, exponential or tanh is counted apart (`special`),
never as a FLOP; causality and windows count visible pairs exactly. torch's own counter returns 0
for fused CPU attention and ignores causality, so it is not used.

Notation: B batch, H heads, n_q and n_k lengths, d key width, e value width, a hidden width, p features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """FLOPs and special functions of one forward, and the bytes that must move at least."""

    flops: int
    special: int
    bytes_forward: int
    bytes_backward: int


def _clamped_sum(count: int, start: int, top: int) -> int:
    """`sum(min(max(i + start, 0), top) for i in range(count))` in closed form."""
    first = min(max(0, -start), count)  # rows below are clamped to 0
    last = min(max(top - start, first), count)  # rows from here are clamped to top
    rows = last - first
    return rows * (first + start) + rows * (rows - 1) // 2 + (count - last) * top


def visible_pairs(
    query_length: int,
    key_length: int,
    *,
    causal: bool = False,
    offset: int = 0,
    window: tuple[int | None, int | None] | None = None,
) -> int:
    """How many (query, key) pairs are visible, in closed form: 10^6 tokens cost as much as ten.

    `offset` is the first query's position; `window` counts inclusively around the query's position.
    """
    left, right = window if window is not None else (None, None)
    if causal:
        right = 0
    upper = query_length * key_length if right is None else _clamped_sum(query_length, offset + right + 1, key_length)
    lower = 0 if left is None else _clamped_sum(query_length, offset - left, key_length)
    return upper - lower


def forward_cost(
    formula: str,
    *,
    batch: int,
    num_heads: int,
    query_length: int,
    key_length: int,
    key_dim: int,
    value_dim: int,
    itemsize: int = 4,
    pairs: int | None = None,
    causal: bool = False,
    chunk: int = 128,
    options: Mapping[str, Any] | None = None,
) -> Cost | None:
    """The cost of one forward of `formula`, or None where the formula is not known here.

    `pairs` is the number of visible pairs a head (default: all, or the square causal count). `chunk` is
    the causal linear form's chunk length. `options` are the variant's own (`score`, `hidden_size`).
    """
    inputs = dict(options or {})
    n_q, n_k, d, e = query_length, key_length, key_dim, value_dim
    visible = visible_pairs(n_q, n_k, causal=causal) if pairs is None else pairs
    hidden = inputs.get("hidden_size") or d
    special = visible  # one exponential a visible pair, where there is a softmax
    if formula == "softmax_dot_product":
        flops = 2 * visible * (d + e)
    elif formula == "additive":
        # two multiply-adds and one reciprocal a hidden unit and pair, both projections, weights times values
        flops = 4 * visible * hidden + 2 * visible * e + 2 * (n_q + n_k) * d * hidden
        special += visible * hidden
    elif formula == "multiplicative":
        score = inputs.get("score", "general")
        flops = 2 * visible * e
        if score in ("dot", "general"):
            flops += 2 * visible * d + (2 * n_q * d * d if score == "general" else 0)
        elif score == "concat":
            flops += 4 * visible * hidden + 2 * (n_q + n_k) * d * hidden
            special += visible * hidden
        else:  # location: one dot product of the query with a row per key position
            flops += 2 * visible * d
    elif formula == "linearised":
        p = _features(d, inputs)
        flops = 4 * n_q * p * e + (n_q * min(chunk, n_q) * (p + e) if causal else 0)
        special = 0
    elif formula in ("fast_weights", "gated"):
        flops = 4 * n_q * d * e  # write, read at the query
        special = 0
    elif formula in ("delta_rule", "gated_delta"):
        flops = 6 * n_q * d * e  # read the memory at the key, write the correction, read at the query
        special = 0
    else:
        return None
    heads = batch * num_heads
    moved = n_q * (d + e) + n_k * (d + e)  # Q and O, K and V
    return Cost(
        flops=heads * flops,
        special=heads * special,
        bytes_forward=heads * moved * itemsize,
        bytes_backward=heads * (2 * n_q * d + n_q * e + 2 * n_k * (d + e)) * itemsize,  # QKV, dO, dQdKdV
    )


def _features(width: int, options: Mapping[str, Any]) -> int:
    """P of a linearised variant's feature map; making the features is not counted."""
    return {
        "taylor": 1 + width + width * width,
        "dpfp": 2 * width * (options.get("nu") or 1),
        "cosine": 1 + width,
        "favor": options.get("num_features") or max(width, int(width * math.log(width))),
        "hedgehog": 2 * width,
        "cosformer": 2 * width,
    }.get(options.get("feature_map", "elu"), width)


BACKWARD_FACTOR = 2.5
"""A softmax backward runs five products where the forward ran two."""


def memory_estimate(
    *,
    batch: int,
    num_heads: int,
    query_length: int,
    key_length: int,
    key_dim: int,
    value_dim: int,
    itemsize: int = 4,
    linear_memory: bool,
    backward: bool,
) -> int:
    """A first guess of the extra bytes of one call, before anything was measured.

    A variant that claims `linear_memory` holds a few copies of its inputs; another may hold the scores,
    the weights and, in the backward, the gradients of both.
    """
    heads = batch * num_heads
    rows = heads * (query_length * (key_dim + value_dim) + key_length * (key_dim + value_dim)) * itemsize
    copies = 8 if backward else 4
    if linear_memory:
        return copies * rows
    square = heads * query_length * key_length * itemsize
    return copies * rows + (4 if backward else 2) * square


def extrapolate(
    points: Mapping[int, float], length: int, *, default: float, low: float = 1.0, high: float = 2.3
) -> float:
    """The value expected at `length` from values at shorter lengths; 0 where there are none.

    The slope comes from the two longest points (one point: `default`), held within `low` and `high`.
    """
    known = sorted((n, v) for n, v in points.items() if v > 0 and n > 0)
    if not known:
        return 0.0
    (last, value) = known[-1]
    slope = default
    if len(known) > 1:
        before, earlier = known[-2]
        slope = min(max(math.log(value / earlier) / math.log(last / before), low), high)
    return float(value * (length / last) ** slope)
