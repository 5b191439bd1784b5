"""Positions inside the score, in T5's buckets, which an integer buffer holds. Needs torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import ScoreAttention
from attnlab.engines import accumulation_dtype
from attnlab.formulas import per_query_head, softmax_attention, without_absent


def _steps(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """j - i: `[1, tq, tk]` or `[B, 1, tq, tk]`."""
    step = key_positions[..., None, :] - query_positions[..., :, None]
    return step[:, None] if step.dim() == 3 else step[None]


def bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: dict[str, Any],
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax((q_i^T k_j + table[h, bucket(j - i)]) * scale) v; default scale 1."""
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    steps = positions[1][:, None, :] - positions[0][:, :, None]
    result, at = torch.unique(steps, return_inverse=True)
    buckets = torch.tensor([_bucket(int(s), options) for s in result], device=query.device)[at]  # [B, Lq, Lk]
    added = parameters["table"][:, buckets].transpose(0, 1)
    scores = query @ key.transpose(-1, -2) + added
    scale = 1.0 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


def _bucket(step: int, options: dict[str, Any]) -> int:
    """T5's bidirectional bucket of one distance, by its published formula."""
    half, far = int(options["num_buckets"]) // 2, int(options["max_distance"])
    base, distance, near = (half if step > 0 else 0), abs(step), half // 2
    if distance < near:
        return base + distance
    return base + min(near + int(math.log(distance / near) / math.log(far / near) * (half - near)), half - 1)


class BucketedBiasAttention(ScoreAttention):
    """`softmax_j(q_i^T k_j + table[h, bucket(j - i)])`. Raffel et al. 2020, "T5", section 2.1; default scale 1.

    Parameter: `table [H, num_buckets]`. Buffer: `buckets [2 max_distance + 1]`, int64, the bucket of each distance; distances
    beyond the table share its ends.
    """

    name = "bucketed_bias"
    formula = "bucketed_bias"
    definition = staticmethod(bucketed)
    capabilities = replace(ScoreAttention.capabilities, position_free=False)
    buckets: Tensor

    def __init__(self, *, num_buckets: int = 8, max_distance: int = 20, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"num_buckets": num_buckets, "max_distance": max_distance}
        self.table = nn.Parameter(torch.randn(self.num_heads, num_buckets))
        steps = range(-max_distance, max_distance + 1)
        self.register_buffer("buckets", torch.tensor([_bucket(s, self.options) for s in steps]))

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide, far = accumulation_dtype(query.dtype), self.options["max_distance"]
        buckets = self.buckets[_steps(query_positions, key_positions).clamp(-far, far) + far]  # [B | 1, (1,) tq, tk]
        added = self.table.to(wide)[:, buckets.flatten(0, -3)].transpose(0, 1)  # [B | 1, H, tq, tk]
        return query.to(wide) @ key.to(wide).transpose(-1, -2) + added
