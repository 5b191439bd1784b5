"""Fewer slots than keys: means of blocks, a learned projection of the length, softmax over features and positions. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import Attention, AttentionOutput, Call, Capabilities, InvalidInput, Reason, Request
from attnlab.engines import in_own_precision
from attnlab_evaluations.suite_proof.correct._shared import each_head, scale_of, softmax_rows, widened

WHOLE = Capabilities(
    key_mask=True,
    scale=True,
    cross_lengths=True,
    gqa=True,
    value_dim=True,
    weights="effective",
    backward=True,
    dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
    devices=frozenset({"cpu", "cuda"}),
    exact=True,
    deterministic=True,
    linear_in_value=True,
    linear_memory=True,
)
"""What a variant that reads all present keys at once can be asked for: no rule of its own for each pair."""


def block_means(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: dict[str, Any],
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Softmax over blocks of a row's visible keys, each block the mean of its keys and of its values."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    share = visible.to(key.dtype)
    means, scores = [], []
    starts = range(0, key.shape[2], options["block"])
    for start in starts:
        inside = torch.zeros(key.shape[2], dtype=key.dtype, device=key.device)
        inside[start : start + options["block"]] = 1
        part = share * inside  # [B, H, Lq, Lk]
        mean = part / part.sum(-1, keepdim=True).clamp_min(1)
        means.append(mean)
        scores.append(torch.einsum("bhij,bhjd,bhid->bhi", mean, key, query) * scale)
    blocks = torch.stack(means, -2)  # [B, H, Lq, blocks, Lk]
    w, _ = softmax_rows(torch.stack(scores, -1), (blocks != 0).any(-1))
    weights = torch.einsum("bhin,bhinj->bhij", w, blocks)
    return {"out": weights @ value, "weights": weights}


class BlockMeansAttention(Attention):
    """Keys and values are averaged over blocks of `block` positions before softmax attention.

    Source: the compressed memory of Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", section 4.2.3, with
    means in place of a convolution. Absent keys join no mean; a block without keys is no block. A key has a place, so order
    matters. No pair may be hidden: a mean cannot be taken back.
    """

    name = "block_means"
    formula = "block_means"
    definition = staticmethod(block_means)
    capabilities = replace(WHOLE, linear_memory=False)  # a third of all pairs is quadratic as well

    def __init__(self, *, block: int = 3, **sizes: Any) -> None:
        super().__init__(**sizes)
        if block < 1:
            raise InvalidInput(f"{self.name}: block must be 1 or more, got {block}")
        self.options = {"block": block}

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        n, length = self.options["block"], k.shape[2]
        present = torch.ones(k.shape[0], length, dtype=torch.bool, device=k.device)
        if call.visibility is not None and call.visibility.key_present is not None:
            present = call.visibility.key_present
        pad, blocks = -length % n, -(-length // n)
        counts = nn.functional.pad(present, (0, pad)).view(-1, 1, blocks, n).sum(-1, keepdim=True)
        k, v = (nn.functional.pad(x, (0, 0, 0, pad)).reshape(*x.shape[:2], blocks, n, -1).sum(3) for x in (k, v))
        k, v = k / counts.clamp_min(1), v / counts.clamp_min(1)  # [B, H, blocks, D]; absent keys hold 0
        scale = scale_of(self, call)
        empty = (counts == 0)[:, :, None, :, 0]  # [B, 1, 1, blocks]
        s = (q @ k.transpose(-1, -2) * scale).masked_fill(empty, -torch.inf)
        s = s.masked_fill(empty.all(-1, keepdim=True), 0)
        w = torch.softmax(s, -1).masked_fill(empty, 0)
        weights = None
        if call.need_weights:
            each = (w / counts[:, :, None, :, 0].clamp_min(1)).repeat_interleave(n, -1)[..., :length]
            weights = each.masked_fill(~present[:, None, None], 0).to(query.dtype)
        return AttentionOutput((w @ v).to(query.dtype), weights)


def projected_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(q_i^T (E K)_r * scale) (E V)_r, E's columns those of the row's visible keys."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    e = parameters["E"][:, : key.shape[2]] * visible[..., None, :]  # [B, H, Lq, R, Lk]
    s = torch.einsum("bhirj,bhjd,bhid->bhir", e, key, query) * scale
    w = torch.softmax(s, dim=-1) if s.shape[-1] else s
    weights = torch.einsum("bhir,bhirj->bhij", w, e)
    return {"out": weights @ value, "weights": weights}


class ProjectedLengthAttention(Attention):
    """Keys and values are projected from their length to `slots` by a learned E. Wang et al. 2020, "Linformer", eq. 7.

    Parameter: `E [slots, max_length]`, shared by heads, keys and values (their layer-wise sharing within a layer). More keys than
    `max_length` are refused. Weights are the map from value to out, whose rows sum to anything.
    """

    name = "projected_length"
    formula = "projected_length"
    definition = staticmethod(projected_length)
    capabilities = WHOLE

    def __init__(self, *, slots: int = 4, max_length: int = 100, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"slots": slots, "max_length": max_length}
        self.E = nn.Parameter(torch.randn(slots, max_length) * slots**-0.5)

    def supports(self, request: Request) -> list[Reason]:
        reasons = super().supports(request)
        longest = self.options["max_length"]
        if request.key_length > longest:
            reasons.append(Reason("key_length", f"{request.key_length} keys", f"up to max_length={longest}"))
        return reasons

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)  # absent keys hold 0: they add nothing to any slot
        e = self.E[:, : k.shape[2]].to(k.dtype)
        scale = scale_of(self, call)
        w = torch.softmax(q @ (e @ k).transpose(-1, -2) * scale, -1)  # [B, H, Lq, slots]
        weights = None
        if call.need_weights:
            weights = w @ e
            if call.visibility is not None:
                weights = weights.masked_fill(~call.visibility.dense(), 0)
            weights = weights.to(query.dtype)
        return AttentionOutput((w @ (e @ v)).to(query.dtype), weights)


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """sum_d softmax_d(q_i) sum_j softmax_j(k_jd) v_j, the second over the row's visible keys."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    chosen = torch.softmax(query, dim=-1)
    inside = key[:, :, None].expand(*visible.shape, -1).transpose(-1, -2)  # [B, H, Lq, D, Lk]
    places, _ = softmax_rows(inside, visible[..., None, :])
    weights = torch.einsum("bhid,bhidj->bhij", chosen, places)
    return {"out": weights @ value, "weights": weights}


class EfficientAttention(Attention):
    """`softmax(Q) softmax(K)^T V`, over features and over positions. Shen et al. 2018, "Efficient Attention", eq. 6.

    All present keys or none: it cannot be causal. Its effective weights sum to 1; a scale is not part of the formula.
    """

    name = "efficient"
    formula = "efficient"
    definition = staticmethod(efficient)
    capabilities = Capabilities(
        key_mask=True,
        cross_lengths=True,
        gqa=True,
        value_dim=True,
        weights="effective",
        backward=True,
        dtypes=WHOLE.dtypes,
        devices=WHOLE.devices,
        exact=True,
        normalised=True,
        position_free=True,
        deterministic=True,
        linear_in_value=True,
        linear_memory=True,
    )

    def default_scale(self) -> None:
        return None

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        q, k, v = widened(query, key, value)
        present = None if call.visibility is None else call.visibility.key_present
        if present is not None:
            absent = ~present[:, None, :, None]  # [B, 1, Lk, 1]
            k = k.masked_fill(absent, -torch.inf).masked_fill(absent.all(2, keepdim=True), 0)
            places = torch.softmax(k, 2).masked_fill(absent, 0)
        else:
            places = torch.softmax(k, 2)
        chosen = torch.softmax(q, -1)
        out = chosen @ (places.transpose(-1, -2) @ v)
        weights = (chosen @ places.transpose(-1, -2)).to(query.dtype) if call.need_weights else None
        return AttentionOutput(out.to(query.dtype), weights)
