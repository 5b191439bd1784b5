"""Mutants that the checks in `checks/laws.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookLocation
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookMaps

Shape = tuple[int, int, int, int]


class TellsAnotherScale(TextbookAttention):
    """default_scale() says 1, and 1 / sqrt(d) is used."""

    def default_scale(self) -> float:
        return 1.0


class MasksAfterTheSoftmax(TextbookAttention):
    """Hidden weights are zeroed after the normaliser has summed them."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalised(s, torch.ones_like(visible), sinks)
        return weights * visible, torch.where(visible.any(-1), lse, -torch.inf)


class LocationCountsFromTheTile(TextbookLocation):
    """Columns are numbered within the tile: packed sequences and later tiles read the wrong row of W_a."""

    def scores(self, query: Tensor, key: Tensor, **positions: Any) -> Tensor:
        return query[..., : key.shape[2]]


class LocationBeginsAnywhere(TextbookLocation):
    """Rows of W_a are numbered from 0, and the variant claims that only differences of positions count."""

    shift_invariant = True


class IgnoresScale(TextbookAttention):
    def scale(self, call: Call) -> float:
        return float(self.key_dim**-0.5)


class OneMoreInTheNormaliser(TextbookAttention):
    """softmax1, e / (1 + sum e), claimed to be softmax."""

    def normalised(self, s: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(s.shape[1], dtype=s.dtype, device=s.device)
        return super().normalised(s, visible, zero if sinks is None else sinks)


class LeansOnKeyPosition(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) + 0.1 * torch.arange(k.shape[2], device=k.device)


class LeansOnQueryPosition(TextbookAttention):
    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) * (1 + 0.1 * torch.arange(q.shape[2], device=q.device)[:, None])


class ClampsTheOutput(TextbookAttention):
    def mixed(self, weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return super().mixed(weights, v, visible).clamp(-1.0, 1.0)


class ClaimsToBeNormalised(TextbookMaps):
    """Sums are divided by the number of keys."""

    normalise = False

    def default_scale(self) -> float | None:
        return None


class SegmentsAreIgnored(TextbookAttention):
    def visible(self, call: Call, shape: Shape, device: torch.device) -> Tensor:
        visibility = call.visibility
        if visibility is not None and visibility.query_segments is not None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        return super().visible(call, shape, device)


class ClaimsANullKey(TextbookAttention):
    """No slot takes weight: the claim switches laws off that it obeys."""

    capabilities = replace(TextbookAttention.capabilities, null_key=True)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(MasksAfterTheSoftmax, "equal_values_are_returned", "weights are masked and not normalised again"),
    Mutant(TellsAnotherScale, "default_scale_is_used", "default_scale() is not what is used"),
    Mutant(LocationCountsFromTheTile, "packed_sequences_equal_separate_ones", "columns of the tile"),
    Mutant(LocationBeginsAnywhere, "shift_invariance", "an absolute position called relative"),
    Mutant(IgnoresScale, "scale_zero_gives_the_mean", "scale= does not arrive"),
    Mutant(OneMoreInTheNormaliser, "equal_values_are_returned", "softmax1 under the name of softmax"),
    Mutant(OneMoreInTheNormaliser, "a_single_visible_key_returns_its_value", "softmax1 under the name of softmax"),
    Mutant(OneMoreInTheNormaliser, "duplicated_keys_change_no_output", "softmax1 under the name of softmax"),
    Mutant(LeansOnKeyPosition, "key_permutation_invariance", "position_free is claimed beside a positional score"),
    Mutant(LeansOnQueryPosition, "query_permutation_equivariance", "the temperature depends on the row"),
    Mutant(ClampsTheOutput, "linear_in_value", "outputs are clamped"),
    Mutant(ClaimsToBeNormalised, "equal_values_are_returned", "`normalised` is claimed of plain sums"),
    Mutant(SegmentsAreIgnored, "packed_sequences_equal_separate_ones", "packed sequences see each other"),
    Mutant(ClaimsANullKey, "null_key_takes_weight", "a null slot is claimed that is not there"),
)
