"""torch's fused attention, wherever a request of softmax dot-product attention fits it. Needs torch.

torch's function means True = may attend and aligns `is_causal` top-left; it takes `is_causal` or a mask, not both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlab._lengths import holds
from attnlab.call import AttentionOutput
from attnlab.engines.tiled import PLAIN_ELEMENTS
from attnlab.state import CacheState, State
from attnlab.validation.fast_path import FastPath

if TYPE_CHECKING:
    from attnlab.call import Call
    from attnlab.visibility import Visibility

# A mask that must be built is built up to this many elements (bytes, as bool); beyond, tiles need less memory.
MASK_ELEMENTS = 1 << 24


def fused_attention(query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> Tensor | None:
    """`out [B, Hq, Lq, Dv]` by torch's function, or None where the request does not fit it.

    `scale` None is torch's default, `Dk^-0.5`. What decides is the request: its flags and shapes, never values.
    """
    if not asks_for_out_alone(call):
        return None
    certain = holds if torch.compiler.is_compiling() else bool  # in a graph, for every length that it serves
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    trained = call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled()
    if query.device.type == "cpu" and (value.shape[3] != key.shape[3] or trained) and certain(pairs > PLAIN_ELEMENTS):
        return None  # torch would fall back to the plain formula, which forms every pair; tiles do not
    if scale is not None and scale <= 0:
        # torch's kernels scale after hiding with -inf, which 0 and negative scales turn into NaN and +inf.
        query, scale = query * scale, 1.0
    query, key, value = _laid_out(query, key, value)
    # A branch, so that it is a bool where shapes are dynamic as well.
    grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210
    visibility = call.visibility
    if visibility is None and call.bias is None:
        return _over_groups(query, key, value, None, scale, grouped)
    mask: Tensor | None = None
    if visibility is not None:
        if (
            visibility.only_causal
            and visibility.key_present is None
            and call.bias is None
            and _is_zero(visibility.offset)
        ):
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        if visibility.mask_mod is not None:
            return None
        if visibility.positional or visibility.query_segments is not None:
            rows = query.shape[0] if visibility.key_present is not None or visibility.query_segments is not None else 1
            rows = max(rows, query.shape[0] if isinstance(visibility.offset, Tensor) else 1)
            if certain(rows * query.shape[2] * key.shape[2] > MASK_ELEMENTS):
                return None
        if visibility.pairwise:
            mask = _once(visibility.dense())
        elif visibility.key_present is not None:
            mask = visibility.key_present[:, None, None, :]  # one row: torch would fill an expanded one
    if call.bias is not None:
        bias = _kept_finite(call.bias if trained else _once(call.bias), query.dtype, query.device.type)
        if mask is None:
            mask = bias.expand(*bias.shape[:3], key.shape[2])
        else:
            mask = torch.where(mask, bias, torch.full((), -torch.inf, dtype=bias.dtype, device=query.device))
    return _over_groups(query, key, value, mask, scale, grouped)


def _over_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, grouped: bool
) -> Tensor:
    """torch's function; one query's heads of a group go as rows beside each other, so that each key is read once."""
    alone = grouped and not torch.compiler.is_compiling() and query.shape[2] == 1
    if not alone or (mask is not None and mask.shape[1] != 1):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(*query.shape[:3], value.shape[3])


class FusedSoftmax(FastPath):
    """torch's function with its defaults: the fast path of `softmax(q k^T / sqrt(Dk)) v` with all that `ScoreAttention` takes."""

    def function(
        self, variant: Any, causal: bool, contiguous: bool
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        if variant.num_heads != variant.num_kv_heads:
            return None
        if causal:
            return _CONTIGUOUS_CAUSAL if contiguous else _causal
        return scaled_dot_product_attention if contiguous else _bare

    def masked(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> Tensor | None:
        """None unless the mask is there as a tensor and has no window, which the banded engine serves."""
        mask = visibility.known_dense
        if variant.num_heads != variant.num_kv_heads or value.shape[3] != key.shape[3]:
            return None
        if mask is None or visibility.left is not None or visibility.right:
            return None
        if not visibility.pairwise:  # one row, as the whole mask repeats it, or nothing
            mask = None if visibility.key_present is None else visibility.key_present[:, None, None, :]
        return scaled_dot_product_attention(*_laid_out(query, key, value), attn_mask=mask)

    def step(self, variant: Any, query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
        return fused_step(query, key, value, state)


_CONTIGUOUS_CAUSAL = partial(scaled_dot_product_attention, is_causal=True)


def _bare(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(*_laid_out(query, key, value))


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(*_laid_out(query, key, value), is_causal=True)


def _laid_out(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a layout that torch's fused kernels take.

    Flash kernels need adjacent head elements, else torch takes the plain formula without a word; with overlapping rows of the query the
    CPU kernel gives its result the query's strides.
    """
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1 or query.stride(2) < query.shape[3]:
        return query.contiguous(), key.contiguous(), value.contiguous()
    return query, key, value


def fused_step(query: Tensor, key: Tensor, value: Tensor, state: State) -> AttentionOutput | None:
    """One new token against a cache of which it may see everything, by torch's function with its own scale.

    None for a cache or a call that needs more.
    """
    batch, heads, queries, width = query.shape
    _, kv_heads, keys, value_dim = value.shape
    if queries != 1 or keys != 1 or width != value_dim or not isinstance(state, CacheState):
        return None  # torch's CPU kernel takes one width
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    held = state.append_step(key, value)
    if held is None:
        return None
    if heads != kv_heads:  # the queries of a group as rows beside each other: each key is read once
        rows = query.reshape(batch, kv_heads, heads // kv_heads, width)
        out = scaled_dot_product_attention(rows, held[0], held[1]).reshape(batch, heads, 1, value_dim)
    else:
        out = scaled_dot_product_attention(query, held[0], held[1])
    return AttentionOutput(out, None, None, held[2])


def asks_for_out_alone(call: Call) -> bool:
    """Whether nothing is asked that needs scores or weights in hand, a bias aside."""
    return not (
        call.softcap is not None
        or call.score_mod is not None
        or call.sinks is not None
        or call.need_weights
        or call.need_lse
        or call.dropout_p
    )


def _once(x: Tensor) -> Tensor:
    """`x` with each expanded (stride 0) axis of batch and heads as one: torch converts what it is handed, copies and all."""
    if torch.compiler.is_compiling():  # which decides on no stride that depends on a length
        return x
    for axis in (0, 1):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x


def _kept_finite(bias: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """The bias in a dtype that torch's kernels take; a finite value stays finite, as only -inf hides."""
    if device == "cpu" and torch.finfo(dtype).bits < 32:
        dtype = torch.float32  # taken beside a narrower query there, and wider than the query's own
    wide, narrow = torch.finfo(bias.dtype), torch.finfo(dtype)
    if wide.max > narrow.max:
        bias = torch.where(bias.isinf(), bias, bias.clamp(narrow.min, narrow.max))
    return bias.to(dtype)


def _is_zero(offset: int | Tensor) -> bool:
    return isinstance(offset, int) and offset == 0
