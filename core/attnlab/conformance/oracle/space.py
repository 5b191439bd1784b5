"""The space of requests of a variant, and a design that covers it. Needs torch through `features`.

An axis is one thing in which requests differ: an argument, the sizes, the dtype, the contents, the memory layout, the variant's own
options. A design is a list of requests in which every pair of values of all axes occurs (a covering array of strength 2; Cohen et al.
1997, "The AETG system", section 3: rows are built greedily). A quick design holds every value, and every pair of arguments.
Rows hold few arguments at once: what many rules hide together shows nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from attnlab.cache import BoundedCache
from attnlab.capabilities import Capabilities
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.features import CONTENTS, LAYOUTS, UNIT_LENGTH, feature
from attnlab.requirements import NOTHING, Requirements

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal",),
    "offset": (
        *("offset=top_left", "offset=bottom_right", "offset=2", "offset=-2", "offset=per_item", "offset=0d"),
        *("offset=apart", "offset=0", "offset=99", "offset=-99"),
    ),
    "window": (
        *("window=(2,1)", "window=(3,None)", "window=(None,0)", "window=(1,0)", "window=(0,0)", "window=(0,None)"),
        *("window=(None,2)", "window=(None,None)", "window=(Lk-1,0)", "window=(Lk,Lk)", "window=(16,0)"),
        *("window=(63,5)", "window=(None,37)", "window=(8589934592,8589934592)"),
    ),
    "keys": (
        *("key_mask_left", "key_mask_right", "key_mask_holes", "key_lengths", "all_keys_present", "key_mask_strided"),
        *("key_mask_empty", "key_lengths=ones", "key_lengths=apart", "key_lengths=ends"),
    ),
    "query_lengths": ("query_lengths", "query_lengths=ends"),
    "segments": ("segments", "segments=turns", "segments=bytes"),
    "mask": (
        *("mask", "mask_per_item", "mask_per_head", "mask_of_each", "mask_one_row", "mask_one_column"),
        *("mask_per_item_and_key", "mask_per_head_and_row", "mask_hides_nothing"),
    ),
    "mask_mod": ("mask_mod", "mask_mod_by_place"),
    "bias": (
        *("bias", "bias_per_key", "bias_of_each", "hiding_bias", "bias=zero", "bias=rows", "bias=heads"),
        *("bias=items", "bias=shared", "bias=head_and_key", "bias=least", "bias=large"),
    ),
    "softcap": ("softcap", "softcap=10000.0", "softcap=0.05", "softcap=1", "softcap=150.0"),
    "score_mod": ("score_mod", "score_mod_hides", "score_mod_of_places"),
    "sinks": ("sinks", "sinks=200", "sinks=-inf", "sinks=0"),
    "gates": ("gates=strong", "gates=weak"),
    "scale": ("scale", "negative_scale", "scale=0.0", "scale=1", "scale=-0.0"),
}
"""Labels by argument; a request has one of them or none. `Lk` stands for the number of keys."""
HIDING = frozenset({"window", "keys", "query_lengths", "segments", "mask", "mask_mod"})
HIDE_NOTHING = frozenset(
    {"window=(None,None)", "window=(Lk,Lk)", "window=(8589934592,8589934592)", "all_keys_present", "mask_hides_nothing"}
)
EXTREME = frozenset(
    {
        *("window=(0,0)", "key_mask_empty", "key_lengths=ones", "key_lengths=ends", "query_lengths=ends", "bias=least"),
        *("bias=large", "softcap=0.05", "sinks=200", "scale=0.0", "scale=-0.0", "offset=99", "offset=-99"),
        *CONTENTS,
    }
)
"""Values beside which little else shows: a request has one of them at most, and few other arguments."""
UNEVEN = frozenset({"rising_scores", "falling_scores", "large_keys", "opposed", "far_from_0"})
"""Contents whose features are too far apart for one sum in float32 where they are exponential, or cancel where they are cosines."""
SHORT_WIDTH = 16
"""Beside such contents: a sum of more large terms errs by its order."""
FAR = ("offset=99", "offset=-99")
"""Positions past what a variant with learned positions may have."""
BATCHES = (2, 1, 3, 9)
HEADS = ((2, 2), (4, 2), (3, 1), (1, 1), (6, 2), (3, 3), (8, 8), (12, 3))
LENGTHS = (
    *(
        (7, 7),
        (5, 9),
        (9, 5),
        (1, 7),
        (5, 1),
        (1, 1),
        (16, 16),
        (17, 17),
        (31, 33),
        (32, 32),
        (64, 64),
        (65, 65),
        (3, 129),
    ),
    *((70, 16), (66, 131), (128, 128), (137, 137), (1, 256), (257, 257), (260, 64), (5, 513), (513, 513), (577, 577)),
)
WIDTHS = (
    *((8, 8, 8), (8, 8, 5), (6, 8, 8), (16, 16, 16), (1, 1, 1), (5, 5, 5), (32, 32, 16), (16, 16, 64), (64, 64, 64)),
    *((24, 24, 24), (128, 128, 128), (192, 192, 128), (256, 256, 256)),
)
MOST_ARGUMENTS, MOST_HIDING = (7, 4), (3, 2)
"""Of one request: in general, and beside an extreme value."""
MOST_STEPS = 70
"""Tokens of a request for what walks token by token."""
MOST_PAIRS = 2**19
"""Pairs of a query and a key, over items and heads, in one request."""
MOST_PRODUCTS = 2**20
"""The same of the rows that are compared, times the width: what a definition computes."""
MOST_MEMORIES = 2**22
"""Elements of all states that a recurrence passes through, over items and heads, in one request."""
MOST_ELEMENTS = 2**19
"""Elements of one of query, key and value."""

Row = dict[str, Any]
"""A value by axis."""


@dataclass(frozen=True)
class Space:
    """The axes of a variant's requests, the plain value of each first; `settings` are its options as JSON, and what they leave it able to do."""

    axes: Mapping[str, Sequence[Any]]
    settings: Mapping[str, Capabilities] = field(default_factory=dict)
    family: str = ""

    def allows(self, row: Row) -> bool:
        """Whether a request may have these values at once."""
        labels = [row[axis] for axis in ARGUMENTS if row.get(axis)]
        hiding = sum(row[axis] not in HIDE_NOTHING for axis in HIDING if row.get(axis))
        extreme = sum(x in EXTREME for x in (*labels, row.get("contents", "")))
        if len(labels) > MOST_ARGUMENTS[extreme > 0] or hiding > MOST_HIDING[extreme > 0] or extreme > 1:
            return False
        positional = row.get("causal") or row.get("window")
        if row.get("offset") and not positional and {"causal", "window"} & set(self.axes) <= row.keys():
            return False
        if row.get("contents") in UNEVEN and max(row.get("widths", (1,))) > SHORT_WIDTH:
            return False
        if row.get("contents") == "tiny" and row.get("dtype") == "float16":  # 1e-6 has one bit there
            return False
        if row.get("offset") == "offset=apart" and "lengths" in row and row["lengths"][0] > row["lengths"][1]:
            return False
        have = self.settings.get(row.get("options", ""))
        if have is not None and not all(
            have.declares(name) for x in labels for name in feature(_literal(x, 1)).askables
        ):
            return False
        if have is not None and not _fits(row, have):
            return False
        if self.family == "recurrent" and _memories(row) > MOST_MEMORIES:
            return False
        if _defined(row) > MOST_PRODUCTS:
            return False
        return _size(row) <= MOST_PAIRS and _elements(row) <= MOST_ELEMENTS

    def case(self, row: Row, seed: int = 0) -> Case:
        """The request of a whole row."""
        queries, keys = row["lengths"]
        labels = [_literal(row[axis], keys) for axis in (*ARGUMENTS, "contents", "layout") if row.get(axis)]
        sizes = dict(zip(("head_dim", "key_dim", "value_dim"), row["widths"], strict=True))
        sizes |= dict(zip(("num_heads", "num_kv_heads"), row["heads"], strict=True))
        return Case(
            features=tuple(labels),
            batch=row["batch"],
            query_length=queries,
            key_length=keys,
            dtype=row["dtype"],
            options=row.get("options", ""),
            seed=seed,
            **sizes,
        )


def _literal(label: str, keys: int) -> str:
    """The label with the number of keys in the place of `Lk`."""
    return label.replace("Lk-1", str(keys - 1)).replace("Lk", str(keys))


def _fits(row: Row, have: Capabilities) -> bool:
    """Whether a setting of options can be asked for the sizes and the dtype of a row, as far as they are chosen."""
    queries, keys = row.get("lengths", (1, 1))
    heads, kv_heads = row.get("heads", (1, 1))
    query_dim, key_dim, value_dim = row.get("widths", (1, 1, 1))
    asked = {
        "cross_lengths": queries != keys,
        "gqa": heads != kv_heads,
        "query_dim": query_dim != key_dim,
        "value_dim": value_dim != key_dim,
    }
    legal = have.head_dims is None or "widths" not in row or {query_dim, key_dim, value_dim} <= set(have.head_dims)
    return (
        legal
        and row.get("dtype", "") in ("", *have.dtypes)
        and not any(on and not have.declares(n) for n, on in asked.items())
    )


def _defined(row: Row) -> int:
    rows = 12 / max(12, row.get("lengths", (1, 1))[0])
    return int(_size(row) * rows * max(row.get("widths", (1,))))


def _size(row: Row) -> int:
    (queries, keys), (heads, _) = row.get("lengths", (1, 1)), row.get("heads", (1, 1))
    return int(row.get("batch", 1) * heads * queries * keys)


def _memories(row: Row) -> int:
    (queries, keys), (heads, _) = row.get("lengths", (1, 1)), row.get("heads", (1, 1))
    _, key_dim, value_dim = row.get("widths", (1, 1, 1))
    return int(row.get("batch", 1) * heads * min(queries, 16) * keys * key_dim * value_dim)


def _elements(row: Row) -> int:
    heads, _ = row.get("heads", (1, 1))
    return int(row.get("batch", 1) * heads * max(row.get("lengths", (1, 1))) * max(row.get("widths", (1,))))


def space_of(
    settings: Mapping[str, Capabilities],
    requires: Requirements = NOTHING,
    *,
    family: str,
    gated: bool,
    base: str,
    heads: tuple[int | None, int | None] = (None, None),
    widest: int = 256,
) -> Space:
    """The space of a variant. settings: capabilities by options as JSON, those of its defaults ("") first. base: the dtype of plain
    requests. heads: the only numbers of heads that it can be made with. widest: the largest width at which its states are small.

    requires: what every request must be, such as causal.

    A feature of one number may be 0 for every key, which leaves a row without a normaliser: feature maps are asked for no width of 1.
    """
    have = settings[""]
    stepwise = family == "recurrent"
    dtypes = [base, *(d for d in ("float64", "bfloat16", "float16", "float32") if d in have.dtypes and d != base)]
    able = list(settings.values())

    def declared(labels: Iterable[str]) -> list[str]:
        return [x for x in labels if any(all(c.declares(n) for n in feature(_literal(x, 1)).askables) for c in able)]

    axes: dict[str, Sequence[Any]] = {name: ["", *declared(labels)] for name, labels in ARGUMENTS.items()}
    for name in ("causal", "window"):
        if getattr(requires, name):
            axes[name] = axes[name][1:]
    contents = [
        name
        for name in CONTENTS
        if (name in UNIT_LENGTH or not (stepwise or gated)) and (name not in UNEVEN or family != "feature_map")
    ]
    lengths = [
        x
        for x in _legal_lengths(requires)
        if (any(c.cross_lengths for c in able) or x[0] == x[1]) and not (stepwise and max(x) > MOST_STEPS)
    ]
    counts = [(heads[0] or h, heads[1] or k) for h, k in HEADS if have.gqa or h == k]
    axes |= {
        "batch": BATCHES,
        "heads": list(dict.fromkeys(x for x in counts if x[0] % x[1] == 0)),
        "lengths": lengths,
        "widths": [
            x
            for x in _legal(WIDTHS, have.head_dims)
            if (have.value_dim or x[2] == x[1])
            and (have.query_dim or x[0] == x[1])
            and max(x) <= widest
            and (family != "feature_map" or min(x) > 1)
        ],
        "dtype": dtypes,
        "contents": ["", *contents],
        "layout": ["", *LAYOUTS],
        "options": list(settings),
    }
    return Space(
        {name: values for name, values in axes.items() if len(values) > 1 or values[0] != ""}, settings, family
    )


def _legal_lengths(requires: Requirements) -> list[tuple[int, int]]:
    """The pairs of lengths, each at the nearest that is legal."""
    n, longest = requires.length_multiple, requires.max_length
    most = None if longest is None else longest // n * n
    legal = []
    for pair in LENGTHS:
        queries, keys = (-(-x // n) * n if most is None else min(-(-x // n) * n, most) for x in pair)
        legal += [(queries, keys)] * (queries == keys or not requires.equal_lengths)
    return list(dict.fromkeys(legal))


def _legal(widths: Sequence[tuple[int, int, int]], head_dims: range | None) -> list[tuple[int, int, int]]:
    """The widths that are legal; where few are, the first legal ones beside."""
    if head_dims is None:
        return list(widths)
    legal = [x for x in widths if all(d in head_dims for d in x)]
    some = [head_dims[i] for i in sorted({0, len(head_dims) // 2, len(head_dims) - 1}) if head_dims[i] <= 256]
    return list(dict.fromkeys([*legal, *((d, d, d) for d in some or head_dims[:1])]))


Value = tuple[str, int]
Places = dict[str, int]
"""The index of a value, by axis."""
Allowed = Callable[[Row], bool]


def covering(space: Space, *, full: bool = True, seed: int = 0, most: int = 1200) -> list[Row]:
    """Rows in which every pair of values occurs that `space` allows; not `full`: every value, and every two arguments.

    Each argument, and in full each value and every two arguments, is asked for without any other first: a path that is taken where
    there is nothing else shows there alone. Always the same for one seed.
    """
    chance = random.Random(seed)
    names = list(space.axes)
    queue: list[Places] = [dict(pair) for pair in (_pairs(space) if full else _few_pairs(space))]
    chance.shuffle(queue)
    wanted = {tuple(pair.items()) for pair in queue}
    rows: list[Row] = []
    for number, places in enumerate([*(alone := _alone(space, full, chance)), *queue]):
        if len(rows) == most or (number >= len(alone) and tuple(places.items()) not in wanted):
            continue
        row = _row_around(space, places, wanted, names, chance)
        if row is not None:
            wanted -= _covered(row, names)
            rows.append({**row, "alone": number < len(alone) and sum(places.values()) == 1})
    return rows


def _alone(space: Space, full: bool, chance: random.Random) -> list[Places]:
    """One argument without the others: each value, in a quick design the first one; and two without the others."""
    asked = [name for name in space.axes if name in ARGUMENTS]
    plain = dict.fromkeys(asked, 0)
    last = {name: len(space.axes[name]) - 1 for name in asked}
    ones = [{**plain, name: i} for name in asked for i in range(1, 1 + (last[name] if full else min(1, last[name])))]
    twos = [
        {**plain, one: chance.randint(1, last[one]), two: chance.randint(1, last[two])}
        for one, two in combinations(asked, 2)
        if full and last[one] and last[two]
    ]
    return ones + twos


def _pairs(space: Space) -> list[tuple[Value, Value]]:
    """Every pair of values of two axes."""
    return [
        ((a, i), (b, j))
        for a, b in combinations(space.axes, 2)
        for i in range(len(space.axes[a]))
        for j in range(len(space.axes[b]))
    ]


def _few_pairs(space: Space) -> list[tuple[Value, Value]]:
    """Every value beside the first one of another axis, and one pair of each two arguments."""
    names = list(space.axes)
    alone = [((a, i), (b, 0)) for a, b in pairwise(names) for i in range(len(space.axes[a]))]
    asked = [name for name in names if name in ARGUMENTS]
    together: list[Any] = [tuple((x, min(1, len(space.axes[x]) - 1)) for x in two) for two in combinations(asked, 2)]
    return alone + together


def _covered(row: Row, names: Sequence[str]) -> set[tuple[Value, Value]]:
    placed = [(name, row["#"][name]) for name in names]
    return set(combinations(placed, 2))


def _row_around(
    space: Space, start: Places, wanted: set[Any], names: Sequence[str], chance: random.Random
) -> Row | None:
    """A row that holds `start` and as many other wanted pairs as a greedy choice finds; None where `start` is not allowed."""
    places = dict(start)
    row: Row = {name: space.axes[name][i] for name, i in start.items()}
    if not space.allows(row):
        return None
    order = {name: n for n, name in enumerate(names)}
    rest = [name for name in names if name not in places]
    chance.shuffle(rest)
    for name in rest:
        best, most = 0, -1.0
        for i, value in enumerate(space.axes[name]):
            if not space.allows({**row, name: value}):
                continue
            gain = (
                sum((((name, i), x) if order[name] < order[x[0]] else (x, (name, i))) in wanted for x in places.items())
                + 0.5 * chance.random()
            )
            if gain > most:
                best, most = i, gain
        if most < 0:
            return None
        places[name], row[name] = best, space.axes[name][best]
    return {**row, "#": places}


_DESIGNS = BoundedCache(16)


def designed(space: Space, *, full: bool) -> list[Row]:
    """`covering(space)`, made once for spaces that are alike."""
    known = repr((space, full))
    if known not in _DESIGNS:
        _DESIGNS.put(known, covering(space, full=full))
    rows: list[Row] = _DESIGNS[known]
    return rows
