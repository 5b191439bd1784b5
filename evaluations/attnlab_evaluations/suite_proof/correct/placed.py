"""Positions inside the score: ALiBi, T5's buckets in an integer buffer, rotary of even widths. Needs torch."""

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


def alibi(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax((q_i^T k_j / sqrt(Dk) - m_h |i - j|) * scale) v with m_h = 2^(-8 h / H), h = 1..H; default scale 1."""
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    distance = (positions[0][:, :, None] - positions[1][:, None, :]).abs()[:, None].to(query.dtype)
    slopes = torch.tensor(
        [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)], dtype=query.dtype, device=query.device
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1]) - slopes.view(-1, 1, 1) * distance
    scale = 1.0 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


class AlibiAttention(ScoreAttention):
    """`softmax_j(q_i^T k_j / sqrt(Dk) - m_h |i - j|)`, `m_h = 2^(-8 h / H)`. Press et al. 2021, "Train Short, Test Long".

    Symmetric where the call is not causal. A caller's scale multiplies the whole score; the default is 1. Parameter-free: slopes
    are kept by device and dtype outside of the buffers, so that no cast of the module rounds them.
    """

    name = "alibi"
    formula = "alibi"
    definition = staticmethod(alibi)
    capabilities = replace(ScoreAttention.capabilities, position_free=False)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def default_scale(self) -> float:
        return 1.0

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        products: Tensor = query.to(wide) @ key.to(wide).transpose(-1, -2) * self.key_dim**-0.5
        return products - self._slopes(query.device, wide) * _steps(query_positions, key_positions).abs()

    def _slopes(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`[H, 1, 1]`, made once for a device and a dtype."""
        if (device, dtype) not in self._kept:
            heads = self.num_heads
            with torch.inference_mode(False):  # what is kept serves calls that record as well
                numbers = [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]
                self._kept[device, dtype] = torch.tensor(numbers, device=device, dtype=dtype).view(-1, 1, 1)
        return self._kept[device, dtype]


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
    found, at = torch.unique(steps, return_inverse=True)
    buckets = torch.tensor([_bucket(int(s), options) for s in found], device=query.device)[at]  # [B, Lq, Lk]
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


def rotary(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(Re sum_m q_im conj(k_jm) exp(i (i - j) theta_m) * scale) v over pairs m of coordinates; default scale Dk^-0.5."""
    heads, width = query.shape[1], query.shape[3]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    step = (positions[0][:, :, None] - positions[1][:, None, :])[:, None].to(torch.float64)
    scores = torch.zeros(*query.shape[:3], key.shape[2], dtype=query.dtype, device=query.device)
    for m in range(width // 2):
        turn = step * 10000.0 ** (-2 * m / width)
        a, b = query[..., 2 * m, None], query[..., 2 * m + 1, None]
        c, d = key[..., None, :, 2 * m], key[..., None, :, 2 * m + 1]
        cos, sin = torch.cos(turn).to(query.dtype), torch.sin(turn).to(query.dtype)
        scores = scores + (a * c + b * d) * cos + (a * d - b * c) * sin
    scale = width**-0.5 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


class RotaryAttention(ScoreAttention):
    """Queries and keys turned by their positions. Su et al. 2021, "RoFormer", eq. 34; head sizes are even.

    Pairs are neighbours (2m, 2m + 1), angles `position 10000^(-2m / D)`, computed in float32 or better.
    """

    name = "rotary"
    formula = "rotary"
    definition = staticmethod(rotary)
    capabilities = replace(ScoreAttention.capabilities, position_free=False, head_dims=range(2, 513, 2))

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self._turned(query, query_positions) @ self._turned(key, key_positions).transpose(-1, -2)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        wide, width = accumulation_dtype(x.dtype), self.head_dim
        rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width)
        angle = positions[..., :, None].to(torch.float64) * rates  # [L, D / 2] or [B, L, D / 2]
        angle = angle[:, None] if angle.dim() == 3 else angle
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        even, odd = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
