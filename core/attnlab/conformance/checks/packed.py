"""Packed sequences, told apart by segments, give what each gives in a call of its own. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.messages import demand_close, demand_zero
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, recorded, trained
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope
from attnlab.visibility import AttentionMask

ADVICE = "Segments hide every pair of two sequences; positions and both alignments restart in each"

# Ids by row: sequences side by side; -1 (absent) at both ends, and an id that no token has; sequences in pieces, out of order.
SQUARE = ((0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2), (-1, 0, 0, 0, 0, 0, 2, 2, 2, 2, -1), (5, 5, 3, 3, 5, 5, 5, -1, 3, 3, 3))
# Queries of other lengths than the keys above: sequence 2 of the first row is never asked, 1 of the second holds no key.
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
        b, q, k = slice(self.row, self.row + 1), self.queries, self.keys
        named = {
            n: x[b][:, :, q] if n == "query" else x[b][:, :, k] if n in ("key", "value") else self.part(n, x)
            for n, x in inputs.tensors().items()
        }
        rest = {n: self.part(n, x) for n, x in inputs.arguments.items() if n not in ("bias", "gates", "segments")}
        bare = replace(inputs, arguments={n: x for n, x in inputs.arguments.items() if n != "segments"})
        return bare.rebuilt(named).with_tensors(**rest)

    def part(self, name: str, x: Any) -> Any:
        """One argument as this sequence sees it."""
        b, q, k = slice(self.row, self.row + 1), self.queries, self.keys
        if name.startswith("gates."):
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
    inputs = draw(case, variant)
    segments = _segments(case)
    asked = {f"need_{what}": True for what in ("weights", "lse") if what in case.needs}
    with torch.no_grad():
        packed = inputs.with_tensors(segments=segments).run(variant, **asked)
        expected = {"out": torch.zeros_like(packed.out)}
        if "need_weights" in asked:
            expected["weights"] = torch.zeros_like(packed.weights)
        if "need_lse" in asked:
            expected["lse"] = torch.full_like(packed.lse, -torch.inf)
        for piece in _pieces(segments):
            alone = piece.cut(inputs).run(variant, **asked)
            b, q, k = piece.row, piece.queries, piece.keys
            expected["out"][b][:, q] = alone.out[0].to(packed.out.dtype)
            if "weights" in expected:
                expected["weights"][b][:, q[:, None], k] = alone.weights[0].to(packed.weights.dtype)
            if "lse" in expected:
                expected["lse"][b][:, q] = alone.lse[0].to(packed.lse.dtype)
    for what, whole in expected.items():
        size = max(largest(whole), largest(inputs.value))
        demand_close(
            getattr(packed, what),
            whole,
            rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
            variant,
            case,
            what=what,
            versus=f"the sequences called one by one (segments {_told(segments)})",
            advice=ADVICE,
        )


def check_packed_gradients_equal_separate_ones(variant: Any, case: Case) -> None:
    """Gradients of packed sequences, parameters' included, are the sums of those of each alone."""
    inputs = draw(case, variant)
    segments = _segments(case)
    direction = direction_for(inputs)
    weights = trained(variant)

    def slopes(apart: bool) -> dict[str, Tensor]:
        leaves = recorded(inputs.tensors())
        given = inputs.rebuilt(leaves)
        with torch.enable_grad():
            if apart:
                parts = [
                    (piece.cut(given).run(variant).out[0] * direction[piece.row][:, piece.queries]).sum()
                    for piece in _pieces(segments)
                ]
                total = torch.stack(parts).sum()
            else:
                total = (given.with_tensors(segments=segments).run(variant).out * direction).sum()
            found = torch.autograd.grad(
                total, [*leaves.values(), *weights.values()], allow_unused=True, materialize_grads=True
            )
        return dict(zip([*leaves, *weights], found, strict=True))

    packed, separate = slopes(apart=False), slopes(apart=True)
    for name, expected in separate.items():
        size = max(largest(expected), largest(direction) * largest(inputs.value))
        sums = case.batch if expected.dim() < 4 or name not in ("query", "key", "value") else 1
        demand_close(
            packed[name],
            expected,
            rounding_bound(case.dtype, terms=reduction_terms(case) * sums, magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus="the sum over the sequences called one by one",
            advice=ADVICE,
        )
    for name, ids in (("query", segments[0]), ("key", segments[1]), ("value", segments[1])):
        demand_zero(
            packed[name].transpose(1, 2)[ids == -1],
            variant,
            case,
            what=f"gradient of an absent {name} slot",
            why="its segment id is -1",
            advice=ADVICE,
        )


def check_cumulative_lengths_equal_separate_calls(variant: Any, case: Case) -> None:
    """`AttentionMask.from_cu_seqlens`, empty sequences and a tail that no length covers included."""
    inputs = draw(case, variant)
    cu_query, cu_key = (torch.tensor(cu, device=case.device) for cu in CUMULATIVE)
    rules = {n: inputs.arguments[n] for n in ("causal", "offset", "window") if n in inputs.arguments}
    rest = {n: x for n, x in inputs.arguments.items() if n not in rules}
    mask = AttentionMask.from_cu_seqlens(
        cu_query, cu_key, query_length=case.query_length, key_length=case.key_length, **rules
    )
    expected = torch.zeros_like(inputs.query[..., :1].expand(-1, -1, -1, case.value_dim)).clone()
    with torch.no_grad():
        got = variant(inputs.query, inputs.key, inputs.value, mask=mask, **rest).out
        for n in range(len(CUMULATIVE[0]) - 1):
            (q0, q1), (k0, k1) = (cu[n : n + 2] for cu in CUMULATIVE)
            if q1 > q0 and k1 > k0:
                own = torch.arange(q0, q1, device=case.device), torch.arange(k0, k1, device=case.device)
                for b in range(case.batch):
                    expected[b, :, q0:q1] = Piece(b, *own).cut(inputs).run(variant).out[0]
    size = max(largest(expected), largest(inputs.value))
    demand_close(
        got,
        expected,
        rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size),
        variant,
        case,
        what="out",
        versus=f"the sequences called one by one (cumulative lengths {CUMULATIVE[0]} and {CUMULATIVE[1]})",
        advice="An empty sequence takes a number too, and what no length covers is absent. " + ADVICE,
    )


def _told(segments: tuple[Tensor, Tensor]) -> str:
    queries, keys = (" ".join("".join(map(str, row)).replace("-1", "-") for row in ids.tolist()) for ids in segments)
    return queries if queries == keys else f"{queries} of queries, {keys} of keys"


def _segments(case: Case) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys for three rows, square or of other lengths, as the case's sizes say."""
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


def _square(scope: Scope, *needs: str) -> Iterable[Case]:
    labels = ("", "causal", "left_window", "gqa", "score_mod", "mask_mod")
    more = (
        "window",
        "bias_of_each",
        "mask_of_each",
        "sinks",
        "softcap",
        "scale",
        "key_mask_holes",
        "value_dim",
        "batch_offset",
    )
    for label in labels if scope.quick else (*labels, *more):
        yield case(*([label] if label else []), needs=("segments", *needs), dtype=scope.base, **SIDE)
    if not scope.quick:
        yield case("causal", "score_mod", "gqa", needs=("segments", *needs), dtype=scope.base, **SIDE)


def _across(scope: Scope, *needs: str) -> Iterable[Case]:
    labels = ("", "bottom_right", "top_left")
    more = ("int_offset", "negative_offset", "batch_offset", "offset_window", "score_mod", "mask_mod", "gqa", "bias")
    for label in labels if scope.quick else (*labels, *more):
        yield case(*([label] if label else []), needs=("segments", *needs), dtype=scope.base, **CROSS)


def _rows(scope: Scope) -> Iterable[Case]:
    yield from _square(scope)
    yield from _across(scope)
    for dtype in scope.dtypes:
        yield case("causal", needs=("segments",), dtype=dtype, **SIDE)
    for what in ("weights", "lse"):
        for label in ("causal", "bottom_right"):
            sizes = SIDE if label == "causal" else CROSS
            yield case(label, needs=("segments", what), dtype=scope.base, note=what, **sizes)


def _recorded(scope: Scope) -> Iterable[Case]:
    few = ((SIDE, ("causal",)), (CROSS, ("bottom_right",)))
    more = (
        (SIDE, ("left_window", "gqa")),
        (SIDE, ("score_mod", "bias")),
        (CROSS, ("sinks",)),
        (CROSS, ("gqa", "mask_mod")),
    )
    for sizes, labels in few if scope.quick else (*few, *more):
        yield case(*labels, needs=("segments", "backward"), dtype=scope.base, **sizes)


def _cumulative(scope: Scope) -> Iterable[Case]:
    sizes = {"query_length": 11, "key_length": 8, "dtype": scope.base, "needs": ("segments",)}
    for label in (
        ("", "bottom_right") if scope.quick else ("", "bottom_right", "top_left", "offset_window", "score_mod")
    ):
        yield case(*([label] if label else []), batch=2, **sizes)


CHECKS = (
    Check(check_packed_rows_equal_separate_calls, "packed", _rows),
    Check(check_packed_gradients_equal_separate_ones, "packed", _recorded),
    Check(check_cumulative_lengths_equal_separate_calls, "packed", _cumulative),
)
