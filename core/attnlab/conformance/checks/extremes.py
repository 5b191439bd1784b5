"""The output at the ends: special contents, arguments at their borders, lengths past every tile. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import DEFINITION, Comparer, drawn
from attnlab.conformance.oracle.bounds import exact_and_bound, exact_and_bound_of_draws
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.inputs import Inputs, draw, rows_of
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput

Arguments = dict[str, Any]


def _with_a_third_zero(x: Tensor) -> Tensor:
    keep = torch.arange(x.shape[2], device=x.device) % 3 != 0
    return torch.where(keep[:, None], x, 0)


def _ramp(x: Tensor) -> Tensor:
    """From -1 to 1 along the tokens."""
    return torch.linspace(-1, 1, x.shape[2], dtype=x.dtype, device=x.device)[:, None]


CONTENTS: Mapping[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], str]] = {
    "zero queries": (lambda q, k, v: (q * 0, k, v), "Every score is 0 then, and every pair as visible as before"),
    "zero keys": (
        lambda q, k, v: (q, _with_a_third_zero(k), v),
        "A key of zeros is a key: only masks say what is padding; divide by no norm that can be 0",
    ),
    "one key everywhere": (lambda q, k, v: (q, k[:, :, :1].expand_as(k).clone(), v), "All scores of a row are equal"),
    "shorter keys": (
        lambda q, k, v: (q, k * (0.6 + 0.3 * _ramp(k)), v),
        "Lengths of keys count, unless the formula divides by them: norm nothing that it does not norm",
    ),
    "tiny": (
        lambda q, k, v: (q * 1e-6, k * 1e-6, v),
        "An epsilon beside a norm or a normaliser must vanish beside small inputs too",
    ),
    "opposed": (
        lambda q, k, v: (q + 7, k - 7, v),
        "All scores are far below 0: a running maximum starts at -inf, not at 0",
    ),
    "far from the origin": (
        lambda q, k, v: (q + 7, k + 7, v),
        "Large terms that cancel lose the digits of the small difference",
    ),
    "large keys": (
        lambda q, k, v: (q, k * 8, v),
        "Keys may be as large as queries: bound no feature and no score that the formula does not bound",
    ),
    "rising scores": (
        lambda q, k, v: (q / 8 + 5, k / 8 + 5 * _ramp(k), v),
        "A larger maximum in a later tile rescales what was summed before, every sum of it",
    ),
    "falling scores": (
        lambda q, k, v: (q / 8 + 5, k / 8 - 5 * _ramp(k), v),
        "The maximum of a row is that of all its tiles so far, not of the last one",
    ),
    "large values": (
        lambda q, k, v: (q, k, v * (1e4 if v.dtype == torch.float16 else 1e7)),
        "Values are averaged as they are, however large",
    ),
}
"""Contents by name: what becomes of query, key and value, and what a failure means."""
SLOPING = ("rising scores", "falling scores")
"""These need several tiles."""
SHIFTED = ("large keys", "tiny", "opposed", "far from the origin", *SLOPING)
"""These give up the unit length of a recurrence's keys."""


def check_special_contents_agree_with_definition(variant: Any, case: Case) -> None:
    """Zeros, equal keys, tiny, far and opposed numbers give the definition's answer."""
    change, advice = CONTENTS[case.note]
    draws = []
    for seed in (case.seed, case.seed + 31, case.seed + 32):
        one = draw(replace(case, seed=seed), variant)
        query, key, value = change(one.query, one.key, one.value)
        draws.append(one.with_tensors(query=query, key=key, value=value))
    _compare(variant, draws, f"{DEFINITION} ({case.note})", advice)


@dataclass(frozen=True, slots=True)
class Edge:
    """An argument at the end of its range, or of a shape that broadcasts: the askables it needs and how it is made."""

    needs: tuple[str, ...]
    make: Callable[[Inputs], Arguments]
    labels: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)


def _fixed(*needs: str, labels: str = "", sizes: Any = None, **arguments: Any) -> Edge:
    return Edge(needs, lambda x: dict(arguments), labels, sizes or {})


def _shaped(name: str, like: Callable[[Inputs], tuple[int, ...]], labels: str = "") -> Edge:
    """A mask or bias of a shape that broadcasts, each element its own."""

    def make(x: Inputs) -> Arguments:
        count = torch.arange(1, 1 + torch.Size(like(x)).numel(), device=x.query.device).reshape(like(x))
        return {name: count % 3 != 0 if name == "mask" else torch.sin(count.to(x.query.dtype))}

    return Edge((name,), make, labels)


def _gates(x: Inputs) -> Arguments:
    """Every other token at each end: (0, 1) at 1e-3 and 1 - 1e-3, <= 0 at 0 and -20."""

    def ends(gate: Tensor) -> Tensor:
        low, high = (1e-3, 1 - 1e-3) if bool((gate > 0).all()) else (-20.0, 0.0)
        even = torch.arange(gate.shape[2], device=gate.device) % 2 == 0
        even = even if gate.dim() == 3 else even[:, None]
        return torch.where(even, torch.full_like(gate, high), low)

    return {"gates": {n: ends(g) for n, g in x.arguments["gates"].items()}}


def _taking_turns(x: Tensor) -> Tensor:
    """Ids `[B, L]` of three segments whose tokens take turns; in one or two bytes they are one number."""
    turn = torch.arange(x.shape[2], device=x.device).repeat(x.shape[0], 1)
    ids = torch.tensor([3 + 2**16, 3, 3 + 2**8], device=x.device)[turn % 3]
    return ids.masked_fill(turn == 4, -1)


def _hides(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    """A score_mod that hides a third of the pairs, and every key from the second query."""
    hidden = ((q + k + h + b) % 3 == 0) | (q == 1)
    return score + torch.zeros_like(score).masked_fill(hidden, -torch.inf)


def _lengths_apart(x: Inputs) -> Arguments:
    """The first item holds three keys, every other one all of them."""
    lengths = torch.full((x.key.shape[0],), x.key.shape[2], dtype=torch.int32)
    lengths[0] = 3
    return {"key_lengths": lengths}


def _least_bias(x: Inputs) -> Arguments:
    """The least finite number for every key of the third row, 0 elsewhere: it hides nothing, -inf does."""
    bias = x.query.new_zeros(1, 1, x.query.shape[2], x.key.shape[2])
    bias[:, :, 2:3] = torch.finfo(x.query.dtype).min
    return {"bias": bias}


def _offsets_apart(x: Inputs) -> Arguments:
    """The first item's queries stand at the first keys, every other one's at the last."""
    offset = torch.full((x.key.shape[0],), x.key.shape[2] - x.query.shape[2], dtype=torch.int32)
    offset[0] = 0
    return {"causal": True, "offset": offset}


_SHORT, _LONGER = {"query_length": 5, "key_length": 9}, {"query_length": 9, "key_length": 5}
_MANY = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": 140, "key_length": 140}
_APART = {**_MANY, "batch": 2, "query_length": 40}
EDGES: Mapping[str, Edge] = {
    "scale=0": _fixed("scale", scale=0.0),
    "scale=1": _fixed("scale", scale=1),
    "scale=0 of both signs": _fixed("scale", labels="causal", scale=-0.0),
    "window=(0, 0)": _fixed("window", window=(0, 0)),
    "window=(0, None)": _fixed("window", window=(0, None)),
    "window=(0, 2)": _fixed("window", window=(0, 2)),
    "window=(None, None)": _fixed("window", window=(None, None)),
    "window=(99, 99)": _fixed("window", window=(99, 99)),
    "window=(None, 2)": _fixed("window", window=(None, 2)),
    "window=(70, 5) of many": _fixed("window", sizes=_MANY, window=(70, 5)),
    "window=(None, 37) of many": _fixed("window", sizes=_MANY, window=(None, 37)),
    "window past 32 bits": _fixed("window", window=(2**40, 2**40)),
    "offset=0 and more keys": _fixed("causal", "cross_lengths", sizes=_SHORT, causal=True, offset=0),
    "offset=0 and more queries": _fixed("causal", "cross_lengths", sizes=_LONGER, causal=True, offset=0),
    "offset=99": _fixed("causal", causal=True, offset=99),
    "offset=-99": _fixed("causal", causal=True, offset=-99),
    "a 0-d offset": Edge(("causal",), lambda x: {"causal": True, "offset": torch.tensor(1)}),
    "softcap=10000": _fixed("softcap", softcap=1e4),
    "softcap=0.05": _fixed("softcap", softcap=0.05),
    "softcap=1": _fixed("softcap", softcap=1),
    "softcap=150 and large scores": Edge(("softcap",), lambda x: {"softcap": 150.0, "query": x.query * 100}),
    "sinks=200": Edge(("sinks",), lambda x: {"sinks": x.query.new_full((x.query.shape[1],), 200.0)}),
    "sinks=-inf": Edge(("sinks",), lambda x: {"sinks": x.query.new_full((x.query.shape[1],), -torch.inf)}),
    "sinks=0": Edge(("sinks",), lambda x: {"sinks": x.query.new_zeros(x.query.shape[1])}, "mask"),
    "bias of zeros": Edge(("bias",), lambda x: {"bias": x.query.new_zeros(1, 1, 1, 1)}),
    "bias of the least number": Edge(("bias",), _least_bias, "causal"),
    "bias per row": _shaped("bias", lambda x: (1, 1, x.query.shape[2], 1)),
    "bias per head": _shaped("bias", lambda x: (x.query.shape[0], x.query.shape[1], 1, 1), "causal"),
    "bias per item": _shaped("bias", lambda x: (x.query.shape[0], 1, x.query.shape[2], x.key.shape[2])),
    "bias of everything": _shaped("bias", lambda x: (*x.query.shape[:2], x.query.shape[2], x.key.shape[2]), "causal"),
    "mask of one row": _shaped("mask", lambda x: (1, 1, 1, x.key.shape[2]), "causal"),
    "mask of one column": _shaped("mask", lambda x: (1, 1, x.query.shape[2], 1)),
    "mask per item and key": _shaped("mask", lambda x: (x.query.shape[0], 1, 1, x.key.shape[2])),
    "mask of everything": _shaped("mask", lambda x: (*x.query.shape[:2], x.query.shape[2], x.key.shape[2])),
    "mask that hides nothing": Edge(
        ("mask",), lambda x: {"mask": torch.ones(x.query.shape[2], x.key.shape[2]).bool()}, "causal"
    ),
    "all keys present": Edge(
        ("key_mask",), lambda x: {"key_mask": torch.ones(x.key.shape[0], x.key.shape[2]).bool()}, "causal"
    ),
    "key_lengths of one": Edge(("key_mask",), lambda x: {"key_lengths": torch.ones(x.key.shape[0], dtype=torch.int32)}),
    "lengths far apart": Edge(("key_mask", "cross_lengths"), _lengths_apart, sizes=_APART),
    "offsets far apart": Edge(("causal", "cross_lengths"), _offsets_apart, sizes=_APART),
    "score_mod that hides": Edge(("score_mod",), lambda x: {"score_mod": _hides}),
    "score_mod of places alone": _fixed("score_mod", score_mod=lambda score, b, h, q, k: 0.1 * (k - q).to(score.dtype)),
    "segments of int32": Edge(
        ("segments",),
        lambda x: {"segments": tuple(_taking_turns(t).to(torch.int32) for t in (x.query, x.key))},
        "causal",
    ),
    "interleaved segments": Edge(
        ("segments",), lambda x: {"segments": tuple(_taking_turns(t) for t in (x.query, x.key))}, "score_mod"
    ),
    "gates at their ends": Edge(("gates",), _gates, "causal"),
}
"""Arguments at their ends, by name; what a broadcast mask or bias hides and adds differs in every element."""
FAR_OFFSETS = ("offset=99", "offset=-99")


def check_extreme_arguments_agree_with_definition(variant: Any, case: Case) -> None:
    """Falsy and extreme arguments, and masks and biases of every shape that broadcasts, mean what they say."""
    plain, compare = drawn(case, variant)
    arguments = EDGES[case.note].make(plain)
    inputs = plain.with_tensors(**{n: x.to(case.device) if isinstance(x, Tensor) else x for n, x in arguments.items()})
    advice = "Ask `is None`, never truth: 0 is a value; broadcast by axis, and keep every exponent's reference finite"
    versus = f"{DEFINITION} ({case.note})"
    try:
        _compare(variant, [inputs], versus, advice)
    except InvalidInput as refusal:
        # No request tells of a length that the variant was created with, at which its positions end.
        if case.note in FAR_OFFSETS and _has_a_limit(variant):
            raise NotApplicable(f"it refuses this offset: {refusal}") from None
        raise
    for what in (what for what in ("weights", "lse") if getattr(variant.capabilities, what)):
        try:
            exact, limit = exact_and_bound(variant, inputs, what)
        except KeyError:  # the definition gives none
            continue
        got = getattr(inputs.answer(variant, **{f"need_{what}": True}), what)
        compare.close(got, exact, limit, versus, advice, what=what)


def _has_a_limit(variant: Any) -> bool:
    """Whether a whole number among its options is smaller than those offsets."""
    numbers = [x for x in variant.options.values() if isinstance(x, int) and not isinstance(x, bool)]
    return any(0 < x <= 99 for x in numbers)


def check_long_inputs_agree_with_definition(variant: Any, case: Case) -> None:
    """Lengths past the tiles of every usual kernel: rows at the borders equal the definition's."""
    inputs = long_inputs(variant, case)
    rows = sampled_rows(case)
    got = rows_of(inputs.out(variant), rows)
    exact, limit = exact_and_bound(variant, inputs, rows=rows)
    versus = f"{DEFINITION} (rows {', '.join(map(str, rows))})"
    advice = "Look at what passes from tile to tile: the running maximum, both sums, positions, the last partial tile"
    Comparer(variant, inputs).close(got, exact, limit, versus, advice, rows=rows)


def sampled_rows(case: Case) -> list[int]:
    """The first and last rows, those beside the borders of tiles of 64 and 1024, and some between."""
    last = case.query_length - 1
    rows = (0, 1, 63, 64, 65, 255, 256, last // 2, 1023, 1024, last - 70, last - 1, last)
    return sorted({row for row in rows if 0 <= row <= last})


def long_inputs(variant: Any, case: Case) -> Inputs:
    """The case's inputs; noted `late keys`, the first three quarters of the keys are padding: whole tiles hide."""
    inputs = draw(case, variant)
    if case.note != "late keys":
        return inputs
    late = torch.arange(case.key_length, device=case.device) >= 3 * case.key_length // 4
    return inputs.with_tensors(key_mask=late.expand(case.batch, -1))


def _compare(variant: Any, draws: list[Inputs], versus: str, advice: str) -> None:
    """The first draw's out against the definition; the others only measure the plain formula's error."""
    inputs = draws[0]
    exact, limit = exact_and_bound_of_draws(variant, draws)
    if not bool(exact.isfinite().all()):
        raise NotApplicable(f"its formula has no value there: {inputs.case.note}")
    Comparer(variant, inputs).close(inputs.out(variant), exact, limit, versus, advice, inputs=inputs)


def _contents(scope: Scope) -> Iterable[Case]:
    one = {"batch": 1, "num_heads": 1, "num_kv_heads": 1}
    for note in CONTENTS:
        if scope.stepwise and note in SHIFTED:
            continue
        if note in SLOPING:
            yield from scope.cases("", needs=("cross_lengths",), note=note, **one, query_length=5, key_length=600)
            yield from scope.usable("causal", note=note, **one, query_length=140, key_length=140)
            continue
        for dtype in dict.fromkeys((scope.base, scope.precise)):
            yield case(dtype=dtype, note=note)
        yield from scope.cases("causal+key_mask_left", note=note)


def _edges(scope: Scope) -> Iterable[Case]:
    for note, edge in EDGES.items():
        if not (scope.quick and edge.sizes.get("key_length", 0) > 100):
            yield from scope.usable(edge.labels, needs=edge.needs, note=note, **edge.sizes)


def long_cases(scope: Scope) -> Iterable[Case]:
    """Cases of few items and heads past every tile; the precise dtype, so that one key among many shows."""
    length = 300 if scope.stepwise else 1500
    one: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "dtype": scope.precise}
    square = {**one, "query_length": length, "key_length": length}
    two = {"num_heads": 2, "num_kv_heads": 1 if scope.capabilities.gqa else 2}  # whose second lies past a partial tile
    yield case("causal", **{**square, **two})
    if scope.quick:
        return
    yield from scope.usable(
        "bias+softcap", "left_window+sinks", "causal+mask_mod+score_mod", "mask+bias_per_key", **square
    )
    yield banded(scope, one)
    yield case(needs=("key_mask",), note="late keys", **square)
    yield case("bottom_right", **{**square, **two, "batch": 2, "query_length": length // 4 + 3})


def banded(scope: Scope, sizes: Mapping[str, Any]) -> Case:
    """A window and nothing that needs scores in hand, at a length from which kernels for windows serve it."""
    length = 150 if scope.stepwise else 600
    return case("window", **{**sizes, "query_length": length, "key_length": length})


CHECKS = (
    Check(check_special_contents_agree_with_definition, "values", _contents),
    Check(check_extreme_arguments_agree_with_definition, "values", _edges, asks_more=True),
    Check(check_long_inputs_agree_with_definition, "values", long_cases),
)
