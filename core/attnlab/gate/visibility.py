"""The visibility that the gate hands to a variant, and what of it a mask keeps from one call to the next. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.state import State
from attnlab.visibility import AttentionMask, Visibility


def visibility_of_call(
    said: AttentionMask | None, query: Tensor, key: Tensor, state: State | None, subject: str
) -> tuple[Visibility, Tensor | None]:
    """Who sees whom, and which of the call's own keys are absent, bool `[B, 1, Lk, 1]`, or None where all are there.

    Both are what the last call of these shapes was given, where `said` keeps them (`AttentionMask.keeping`).
    """
    kept = None if said is None or state is not None else said.kept
    if kept is None:
        return _resolved(said or AttentionMask(), query, key, state, subject)
    found, dense = kept.found, kept.dense
    batch, heads, length, _ = query.shape
    sizes = (batch, heads, length, key.shape[2], query.device, torch.is_inference_mode_enabled())
    if sizes not in found:
        seen, absent = _resolved(said or AttentionMask(), query, key, None, subject)
        if dense is not None and tuple(dense.shape) == (batch, 1, length, key.shape[2]):
            seen.known_dense = dense
        found[sizes] = seen, absent
    both: tuple[Visibility, Tensor | None] = found[sizes]
    return both


def _resolved(
    said: AttentionMask, query: Tensor, key: Tensor, state: State | None, subject: str
) -> tuple[Visibility, Tensor | None]:
    past, new = None if state is None else state.length, key.shape[2]
    seen = Visibility.resolve(
        said,
        batch=query.shape[0],
        num_heads=query.shape[1],
        query_length=query.shape[2],
        key_length=new + (past or 0),
        device=query.device,
        subject=subject,
        past=past,
        past_present=None if state is None else state.key_present,
        past_segments=None if state is None else state.key_segments,
        past_leading=None if state is None else state.leading,
    )
    present = seen.key_present
    if present is None:
        return seen, None
    return seen, ~present[:, None, -new:, None] if new else present[:, None, :0, None]
