"""Softmax attention within a window of the formula's own. Needs torch.

Source: Beltagy, Peters and Cohan 2020, "Longformer", section 3.1 (the window), and Xiao et al. 2023, "Efficient
Streaming Language Models with Attention Sinks", section 3.2 (the first tokens stay in sight):

    query at position p sees keys at positions p - left .. p + right, and those below sink_tokens up to p + right
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attnlab.formulas._parts import Positions, ScoreMod
from attnlab.formulas.dot_product import softmax_dot_product


def sliding_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    options: Mapping[str, Any],
    scale: float | Tensor | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    gates: Mapping[str, Tensor] | None = None,
    positions: Positions | None = None,
) -> dict[str, Tensor]:
    """softmax(q_i^T k_j * scale) over the visible keys inside the window. `options`: left, right, sink_tokens."""
    if positions is None:
        raise ValueError("sliding_window: needs positions=(query_positions, key_positions)")
    p, j = positions[0][:, None, :, None], positions[1][:, None, None, :]
    near = (j >= p - options["left"]) | (j < options["sink_tokens"])
    if options["right"] is not None:
        near = near & (j <= p + options["right"])
    return softmax_dot_product(
        query,
        key,
        value,
        visible=visible & near,
        parameters=parameters,
        options=options,
        scale=scale,
        bias=bias,
        softcap=softcap,
        score_mod=score_mod,
        sinks=sinks,
        positions=positions,
    )
