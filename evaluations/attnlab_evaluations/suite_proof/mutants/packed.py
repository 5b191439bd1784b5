"""Mutants that the checks in `checks/packed.py` must fail. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attnlab import AttentionMask, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.mutants._shared import before_validation


class PositionsRunThroughTheRow(TextbookAttention):
    """What a score_mod sees as positions does not start again with each sequence."""

    def modified(self, s: Tensor, call: Call) -> Tensor:
        visibility = call.visibility
        if call.score_mod is None or visibility is None or visibility.query_segments is None:
            return super().modified(s, call)
        b, h, q, k = visibility.indices(0, s.shape[2], 0, s.shape[3])
        q, k = torch.arange(s.shape[2], device=s.device)[:, None], torch.arange(s.shape[3], device=s.device)
        return call.score_mod(s, b, h, q, k).to(s.dtype)


class AlignsTheWholeRow(TextbookAttention):
    """The bottom right is the row's: queries of every sequence move by the row's surplus of keys."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        aligned = visibility is not None and isinstance(visibility.offset, Tensor) and visibility.offset.dim() == 2
        if visibility is not None and aligned and call.state is None:
            visibility.offset, visibility._query_positions = shape[3] - shape[2], None
        return super().visible(call, shape, device)


class TellsRunsApart(TextbookAttention):
    """A sequence in two pieces is taken for two: runs of ids are counted, not ids compared."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visible, observed = super().visible(call, shape, device), call.visibility
        if (
            observed is None
            or observed.query_segments is None
            or observed.key_segments is None
            or call.state is not None
        ):
            return visible
        if shape[2] != shape[3]:
            return visible
        runs = [_runs(ids) for ids in (observed.query_segments, observed.key_segments)]
        return visible & (runs[0][:, None, :, None] == runs[1][:, None, None, :])


class PairsSequencesInOrder(TextbookAttention):
    """The n-th sequence of queries is given the n-th sequence of keys, also where one of them has none."""

    def visible(self, call: Call, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
        visibility = call.visibility
        if (
            visibility is None
            or visibility.query_segments is None
            or visibility.key_segments is None
            or call.state is not None
        ):
            return super().visible(call, shape, device)
        ids = visibility.query_segments, visibility.key_segments
        visibility.query_segments, visibility.key_segments = (_ordinals(x) for x in ids)
        visible = super().visible(call, shape, device)
        visibility.query_segments, visibility.key_segments = ids
        return visible


class LseOfTheRow(TextbookAttention):
    """lse sums over the keys of the whole row, weights over those of the sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        answer = super().attend(query, key, value, call)
        visibility = call.visibility
        if answer.lse is None or visibility is None or visibility.query_segments is None:
            return answer
        own, visibility.query_segments = visibility.query_segments, None
        whole = super().attend(query, key, value, call).lse
        visibility.query_segments = own
        assert whole is not None
        return answer._replace(lse=torch.where(answer.lse == -torch.inf, answer.lse, whole))


class OneGradientAPack(TextbookAttention):
    """Backward stops at the first border: later sequences' keys get no gradient."""

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        visibility = call.visibility
        if visibility is None or visibility.key_segments is None:
            return super().scores(q, k, call)
        first = (visibility.key_segments <= visibility.key_segments[:, :1].clamp(min=0))[:, None, :, None]
        return super().scores(q, torch.where(first, k, k.detach()), call)


def _runs(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)


def _ordinals(ids: Tensor) -> Tensor:
    """Each token's sequence as its place among the row's sequences; -1 stays."""
    rows = [torch.unique(row[row >= 0], return_inverse=True)[1] for row in ids]
    out = torch.full_like(ids, -1)
    for b, row in enumerate(rows):
        out[b, ids[b] >= 0] = row
    return out


def _renumbered(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    """An adapter that rewrites the ids of a mask made from cumulative lengths."""

    def rewrite(named: dict[str, Any]) -> None:
        mask = named.get("mask")
        if isinstance(mask, AttentionMask) and mask.segments is not None:
            kept = {f.name: getattr(mask, f.name) for f in fields(mask)}
            kept["segments"] = tuple(change(ids) for ids in mask.segments)
            named["mask"] = AttentionMask(**kept)

    return rewrite


@before_validation(_renumbered(_ordinals))
class SkipsEmptySequences(TextbookAttention):
    """Sequences without tokens are skipped when numbers are given out, in queries and keys apart."""


@before_validation(_renumbered(lambda ids: torch.where(ids < 0, ids.max(), ids)))
class TheTailJoinsTheLast(TextbookAttention):
    """Tokens that no length covers belong to the last sequence."""


MUTANTS: tuple[Mutant, ...] = (
    Mutant(PositionsRunThroughTheRow, "packed_rows_equal_separate_calls", "positions do not restart"),
    Mutant(AlignsTheWholeRow, "packed_rows_equal_separate_calls", "bottom right of the row, not the sequence"),
    Mutant(TellsRunsApart, "packed_rows_equal_separate_calls", "a sequence in two pieces is two"),
    Mutant(PairsSequencesInOrder, "packed_rows_equal_separate_calls", "n-th queries get n-th keys"),
    Mutant(LseOfTheRow, "packed_rows_equal_separate_calls", "lse over the whole row"),
    Mutant(OneGradientAPack, "packed_gradients_equal_separate_ones", "only the first sequence's keys learn"),
    Mutant(SkipsEmptySequences, "cumulative_lengths_equal_separate_calls", "empty sequences take no number"),
    Mutant(TheTailJoinsTheLast, "cumulative_lengths_equal_separate_calls", "the tail joins the last sequence"),
)
