"""Packed sequences, told apart by segments, give what each gives in a call of its own. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import drawn
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, recorded, slopes, trained
from attnlab.conformance.oracle.inputs import Inputs
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.visibility import AttentionMask

ADVICE = "Segments hide every pair of two sequences; positions and both alignments restart in each"

# Ids by row: sequences side by side; -1 (absent) at both ends, and an id that no token has; sequences in pieces, out of order.
SQUARE = ((0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2), (-1, 0, 0, 0, 0, 0, 2, 2, 2, 2, -1), (5, 5, 3, 3, 5, 5, 5, -1, 3, 3, 3))
# Queries of other lengths than the keys above: sequence 2 of the first row has no query, 1 of the second holds no key.
QUERIES = ((0, 0, 0, 1, 1, 1, 1, 1), (-1, 0, 0, 1, 1, 2, 2, 2), (3, 5, 5, 3, -1, 5, 3, 3))
CUMULATIVE = ((0, 3, 3, 6, 9), (0, 2, 4, 4, 6))
"""Cumulative lengths of queries and of keys: the second sequence has no query, the third no key."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a packed call: its row, and which of the row's queries and keys are its own."""

    row: int
    queries: Tensor
    keys: Tensor

    def cut(self, inputs: Inputs) -> Inputs:
        """The call of this sequence alone."""
        bare = inputs.without("segments", "bias", "gates")
        rest = {n: self.part(n, x) for n, x in bare.arguments.items()}
        return bare.with_tensors(**rest).rebuilt({n: self.part(n, x) for n, x in inputs.tensors().items()})

    def part(self, name: str, x: Any) -> Any:
        """One tensor or argument, cut to this sequence."""
        b, q, k = slice(self.row, self.row + 1), self.queries, self.keys
        if name == "query":
            return x[b][:, :, q]
        if name in ("key", "value") or name.startswith("gates."):
            return x[b][:, :, k]
        if name in ("mask", "bias"):
            x = x[None, None] if x.dim() == 2 else x
            x = x[b] if x.shape[0] > 1 else x
            x = x[:, :, q] if x.shape[2] > 1 else x
            return x[..., k] if x.shape[3] > 1 else x
        if name == "key_mask":
            return x[b][:, k]
        if name == "offset" and isinstance(x, Tensor):
            return x[b]
        if name == "score_mod":
            return lambda score, i, h, query, key: x(score, i + self.row, h, query, key)
        if name == "mask_mod":
            return lambda i, h, query, key: x(i + self.row, h, query, key)
        return x


def check_packed_rows_equal_separate_calls(variant: Any, case: Case) -> None:
    """Out, weights and lse of sequences packed into rows are those of each alone, other lengths and -1 included."""
    inputs, compare = drawn(case, variant)
    segments = _segments(case)
    features = {f"need_{what}": True for what in ("weights", "lse") if what in case.needs}
    packed = inputs.with_tensors(segments=segments).answer(variant, **features)
    fills = {"out": 0.0, "weights": 0.0, "lse": -torch.inf}
    names = [what for what in fills if what == "out" or f"need_{what}" in features]
    expected = {what: torch.full_like(getattr(packed, what), fills[what]) for what in names}
    for piece in _pieces(segments):
        alone = piece.cut(inputs).answer(variant, **features)
        for what, whole in expected.items():
            rows = whole[piece.row]
            own = getattr(alone, what)[0].to(whole.dtype)
            if what == "weights":
                rows[:, piece.queries[:, None], piece.keys] = own
            else:
                rows[:, piece.queries] = own
    for what, whole in expected.items():
        versus = f"the sequences called one by one (segments {_ids_in_words(segments)})"
        compare.same(getattr(packed, what), whole, versus, ADVICE, what)


def check_packed_gradients_equal_separate_ones(variant: Any, case: Case) -> None:
    """Gradients of packed sequences, parameters' included, are the sums of those of each alone."""
    inputs, compare = drawn(case, variant)
    segments = _segments(case)
    direction = direction_for(inputs)

    def grads(apart: bool) -> Gradients:
        leaves = recorded(inputs.tensors())
        call = inputs.rebuilt(leaves)
        with torch.enable_grad():
            if apart:
                parts = [
                    (piece.cut(call).run(variant).out[0] * direction[piece.row][:, piece.queries]).sum()
                    for piece in _pieces(segments)
                ]
                total = torch.stack(parts).sum()
            else:
                total = (call.with_tensors(segments=segments).run(variant).out * direction).sum()
            return slopes(total, {**leaves, **trained(variant)})

    packed = grads(apart=False)
    compare.same_gradients(packed, grads(apart=True), "the sum over the sequences called one by one", ADVICE)
    for name, ids in (("query", segments[0]), ("key", segments[1]), ("value", segments[1])):
        own = packed[name].transpose(1, 2)[ids == -1]
        compare.zero(own, f"gradient of a padded {name} slot", "its segment id is -1", ADVICE)


def check_cumulative_lengths_equal_separate_calls(variant: Any, case: Case) -> None:
    """`AttentionMask.from_cu_seqlens`, empty sequences and a tail that no length covers included."""
    inputs, compare = drawn(case, variant)
    cu_query, cu_key = (torch.tensor(cu, device=case.device) for cu in CUMULATIVE)
    rules = {n: inputs.arguments[n] for n in ("causal", "offset", "window") if n in inputs.arguments}
    lengths = {"query_length": case.query_length, "key_length": case.key_length}
    mask = AttentionMask.from_cu_seqlens(cu_query, cu_key, **lengths, **rules)
    expected = torch.zeros_like(inputs.query[..., :1].expand(-1, -1, -1, case.value_dim)).clone()
    with torch.no_grad():
        rest = inputs.without(*rules).arguments
        got = variant(inputs.query, inputs.key, inputs.value, mask=mask, **rest).out
    for n in range(len(CUMULATIVE[0]) - 1):
        (q0, q1), (k0, k1) = (cu[n : n + 2] for cu in CUMULATIVE)
        if q1 > q0 and k1 > k0:
            own = torch.arange(q0, q1, device=case.device), torch.arange(k0, k1, device=case.device)
            for b in range(case.batch):
                expected[b, :, q0:q1] = Piece(b, *own).cut(inputs).out(variant)[0]
    versus = f"the sequences called one by one (cumulative lengths {CUMULATIVE[0]} and {CUMULATIVE[1]})"
    compare.same(
        got,
        expected,
        versus,
        f"An empty sequence takes a number too, and tokens that no length covers are padding. {ADVICE}",
    )


def _ids_in_words(segments: tuple[Tensor, Tensor]) -> str:
    queries, keys = (" ".join("".join(map(str, row)).replace("-1", "-") for row in ids.tolist()) for ids in segments)
    return queries if queries == keys else f"{queries} of queries, {keys} of keys"


def _segments(case: Case) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys for three rows, square or of other lengths, as the case's sizes say."""
    if case.key_length != len(SQUARE[0]):  # lengths that the variant requires
        raise NotApplicable("its pieces have other lengths than it takes")
    keys = torch.tensor(SQUARE, device=case.device)
    queries = keys.clone() if case.query_length == case.key_length else torch.tensor(QUERIES, device=case.device)
    return queries, keys


def _pieces(segments: tuple[Tensor, Tensor]) -> Iterator[Piece]:
    """Every sequence that has a query."""
    query_ids, key_ids = segments
    for row in range(query_ids.shape[0]):
        for name in sorted(set(query_ids[row].tolist()) - {-1}):
            yield Piece(row, *((ids[row] == name).nonzero()[:, 0] for ids in (query_ids, key_ids)))


SIDE = {"batch": 3, "query_length": len(SQUARE[0]), "key_length": len(SQUARE[0])}
CROSS = {"batch": 3, "query_length": len(QUERIES[0]), "key_length": len(SQUARE[0])}


def _square(scope: Scope) -> Iterable[Case]:
    more = ("window", "bias_of_each", "mask_of_each", "sinks", "softcap", "scale", "key_mask_holes", "value_dim")
    few = ("", "causal", "left_window", "gqa", "score_mod", "mask_mod")
    labels = few if scope.quick else (*few, *more, "batch_offset", "causal+score_mod+gqa")
    return scope.cases(*labels, needs=("segments",), **SIDE)


def _across(scope: Scope) -> Iterable[Case]:
    few = ("", "bottom_right", "top_left")
    more = ("int_offset", "negative_offset", "batch_offset", "offset_window", "score_mod", "mask_mod", "gqa", "bias")
    return scope.cases(*few, *(() if scope.quick else more), needs=("segments",), **CROSS)


def _rows(scope: Scope) -> Iterable[Case]:
    yield from _square(scope)
    yield from _across(scope)
    yield from (case("causal", needs=("segments",), dtype=d, **SIDE) for d in scope.dtypes)
    for what in ("weights", "lse"):
        yield from scope.cases("causal", needs=("segments", what), note=what, **SIDE)
        yield from scope.cases("bottom_right", needs=("segments", what), note=what, **CROSS)


def _recorded(scope: Scope) -> Iterable[Case]:
    few: tuple[tuple[dict[str, int], str], ...] = ((SIDE, "causal"), (CROSS, "bottom_right"))
    more = ((SIDE, "left_window+gqa"), (SIDE, "score_mod+bias"), (CROSS, "sinks"), (CROSS, "gqa+mask_mod"))
    for sizes, labels in few if scope.quick else (*few, *more):
        yield from scope.cases(labels, needs=("segments", "backward"), **sizes)


def _cumulative(scope: Scope) -> Iterable[Case]:
    labels = ("", "bottom_right", *(() if scope.quick else ("top_left", "offset_window", "score_mod")))
    return scope.cases(*labels, batch=2, query_length=11, key_length=8, needs=("segments",))


CHECKS = (
    Check(check_packed_rows_equal_separate_calls, "packed", _rows),
    Check(check_packed_gradients_equal_separate_ones, "packed", _recorded),
    Check(check_cumulative_lengths_equal_separate_calls, "packed", _cumulative),
)
