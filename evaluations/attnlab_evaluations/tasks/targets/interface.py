"""What a call costs more through the attention interface of transformers than that library's own `sdpa`. Needs torch.

transformers is imported when the rows are measured; without it they are not measured, and say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import VariantUnavailable
from attnlab_evaluations.measure.timing import median_interval
from attnlab_evaluations.tasks.targets.goals import NO_TIME, UNMEASURED, Target, random_inputs, time_pair

MOST = 4.0
"""Microseconds that a call may cost more."""
PEER = "transformers' sdpa"
MASKS = {"no mask": None, "causal mask": {}, "padded": {"padding": 2}}
"""The masks that a model hands over: None, or how many tokens of padding stand before the rest."""


class Layer(nn.Module):
    """What the interface reads of a layer."""

    is_causal = True
    num_key_value_groups = 1
    layer_idx = 0


def interface_goals(budget: float, seed: int, say: Callable[[str], None]) -> list[Target]:
    """A row for each kind of mask, within about `budget` seconds."""
    results = []
    for kind in MASKS:
        say(f"interface of transformers, {kind}")
        results.append(overhead(kind, budget / len(MASKS), seed))
    return results


def overhead(kind: str, budget: float, seed: int) -> Target:
    """Microseconds that `dot_product` by name adds to `sdpa` at (1, 2, 8, 16), causal, both with the mask that the model would make."""
    what = f"interface of transformers, (1, 2, 8, 16), {kind}, added"
    try:
        from attnlab.integrations.transformers import registered
    except VariantUnavailable:
        note = "needs transformers: pip install 'attnlab[transformers]'"
        return Target(what, PEER, UNMEASURED, "us", MOST, note)
    from transformers import AttentionInterface, AttentionMaskInterface

    query, key, value = random_inputs(2, 8, 16)
    with registered(["dot_product"]) as names:
        ours, theirs = (
            _call(  # transformers' registries have no annotations
                AttentionInterface()[name],  # type: ignore[no-untyped-call]
                _mask(AttentionMaskInterface()[name], kind),  # type: ignore[no-untyped-call]
                query,
                key,
                value,
            )
            for name in (names["dot_product"], "sdpa")
        )
        pair = time_pair(ours, theirs, budget, seed)
    if pair is None:
        return Target(what, PEER, UNMEASURED, "us", MOST, NO_TIME)
    differences = [(a - b) * 1e6 for a, b in zip(*pair, strict=True)]
    note = f"{statistics.median(pair[0]) * 1e6:.1f} against {statistics.median(pair[1]) * 1e6:.1f} us a call"
    return Target(what, PEER, median_interval(differences), "us", MOST, note)


def _mask(make: Callable[..., Any], kind: str) -> Tensor | None:
    request = MASKS[kind]
    if request is None:
        return None
    length, padding = 8, request.get("padding", 0)
    present = torch.arange(length)[None] >= padding if padding else None
    mask: Tensor = make(
        batch_size=1, q_length=length, kv_length=length, attention_mask=present, allow_is_causal_skip=False
    )
    return mask


def _call(
    function: Callable[..., Any], mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Callable[[], object]:
    layer, scaling = Layer(), query.shape[-1] ** -0.5
    return lambda: function(layer, query, key, value, mask, dropout=0.0, scaling=scaling)
