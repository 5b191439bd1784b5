"""Features of a request by label: its arguments, the sizes that go with them, contents and memory layouts.

A label is one way to use one askable ("key_mask_left", "bottom_right"), or an argument with its number
("window=(64, 0)", "softcap=0.05"). `askables` are the capabilities it needs, `sets` the arguments it sets: two
labels that set the same argument cannot be combined. `feature(label)` finds it. Needs torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from attnlab.errors import InvalidInput, nearest

if TYPE_CHECKING:
    from attnlab.conformance.oracle.cases import Case

Arguments = dict[str, Any]
Main = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Feature:
    """One way to use an askable: what it needs, the sizes it changes, and how its arguments are made.

    contents: what becomes of query, key and value, drawn from the standard normal distribution. layout: what becomes of the
    memory of each of them; the numbers stay. advice: what a failure usually means.
    """

    askables: tuple[str, ...]
    sets: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    build: Callable[[Case, Generator], Arguments] | None = None
    contents: Callable[[Case, Tensor, Tensor, Tensor], Main] | None = None
    layout: Callable[[Tensor], Tensor] | None = None
    advice: str = ""


def _fixed(*askables: str, **arguments: Any) -> Feature:
    return Feature(askables, tuple(arguments), build=lambda case, generator: dict(arguments))


def _built(askable: str, argument: str, build: Callable[[Case, Generator], Any]) -> Feature:
    return Feature((askable,), (argument,), build=lambda case, generator: {argument: build(case, generator)})


def _sized(*askables: str, **sizes: int) -> Feature:
    return Feature(askables, sizes=sizes)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal float64 numbers on the CPU: every dtype and device is cast from the same ones."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _shaped(argument: str, shape: Callable[[Case], tuple[int, ...]]) -> Feature:
    """A mask or bias of a shape that broadcasts, each element its own."""

    def build(case: Case, _: Generator) -> Any:
        count = torch.arange(1, 1 + torch.Size(shape(case)).numel()).reshape(shape(case))
        return count % 3 != 0 if argument == "mask" else torch.sin(count.to(torch.float64))

    return _built(argument, argument, build)


def _chance(generator: Generator, share: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator) < share


def _batch_offset(case: Case, _: Generator) -> Tensor:
    return torch.tensor([2, -1, 0, 3, -2, 1] * case.batch)[: case.batch]


def _present_after(case: Case, _: Generator) -> Tensor:
    """Padding on the left: item b lacks its first b + 1 keys (at least one key stays)."""
    starts = torch.tensor([min(b + 1, case.key_length - 1) for b in range(case.batch)]).view(-1, 1)
    return torch.arange(case.key_length) >= starts


def _lengths(case: Case, length: int) -> Tensor:
    return torch.tensor([max(length - 2 * b - 1, min(1, length)) for b in range(case.batch)], dtype=torch.int64)


def _present_before(case: Case, _: Generator) -> Tensor:
    return torch.arange(case.key_length) < _lengths(case, case.key_length).view(-1, 1)


def _holes(case: Case, generator: Generator) -> Tensor:
    present = _chance(generator, 0.6, case.batch, case.key_length)
    present[:, :1] = True
    return present


def _ids(length: int, batch: int, shift: int) -> Tensor:
    """Three segments and one padded tail token where there is room; borders differ between items."""
    rows = []
    for b in range(batch):
        first, second = max(1, (length + b) // 3), max(2, (2 * length + shift) // 3)
        rows.append([-1 if i == length - 1 and length > 3 else (i >= first) + (i >= second) for i in range(length)])
    return torch.tensor(rows, dtype=torch.int64).reshape(batch, length)


def _segments(case: Case, _: Generator) -> tuple[Tensor, Tensor]:
    key_ids = _ids(case.key_length, case.batch, 1)
    if case.query_length == case.key_length:
        return key_ids, key_ids.clone()
    return _ids(case.query_length, case.batch, 1), key_ids


def _allowed(case: Case, generator: Generator, *shape: int) -> Tensor:
    """Random visibility: the second row sees nothing, and the third sees nothing in the last item and head of several."""
    allowed = _chance(generator, 0.6, *shape, case.query_length, case.key_length)
    allowed[..., 1:2, :] = False
    if max(shape, default=1) > 1:
        allowed[-1:, -1:, 2:3] = False
    return allowed


def hides_a_third(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask_mod that depends on each of its arguments."""
    return (q + 2 * k + h + b) % 3 != 0


def leans_on_distance(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    """A score_mod that depends on each of its arguments."""
    leaned: Tensor = score * (1 + 0.1 * h + 0.05 * (q % 3)) - 0.05 * (q - k) + 0.02 * b + 0.04 * (k % 3)
    return leaned


def _hiding_bias(case: Case, generator: Generator) -> Tensor:
    """Each head hides other pairs; the first row sees nothing in any head."""
    bias = normal(generator, 1, case.num_heads, case.query_length, case.key_length)
    hidden = _chance(generator, 0.4, *bias.shape)
    hidden[..., :1, :] = True
    return bias.masked_fill(hidden, -torch.inf)


def _apart(count: int, first: int, rest: int) -> Tensor:
    """Whole numbers by item: one for the first item, another for every other."""
    lengths = torch.full((count,), rest, dtype=torch.int32)
    lengths[:1] = first
    return lengths


def _offsets_apart(case: Case) -> Tensor:
    """The first item's queries stand at the first keys, every other one's at the last."""
    return _apart(case.batch, 0, case.key_length - case.query_length)


def _all_but_first(case: Case) -> Tensor:
    """Every key of the first item is padding, none of the others."""
    present = torch.ones(case.batch, case.key_length).bool()
    present[:1] = False
    return present


def _turns(case: Case, dtype: torch.dtype, ids: tuple[int, ...] = (3 + 2**16, 3, 3 + 2**8)) -> tuple[Tensor, Tensor]:
    """Three segments whose tokens take turns, the fifth token padded; in one or two bytes the ids are one number."""
    turn = torch.arange(max(case.query_length, case.key_length)).repeat(case.batch, 1)
    whole = torch.tensor(ids)[turn % len(ids)].masked_fill(turn == 4, -1).to(dtype)
    return whole[:, : case.query_length], whole[:, : case.key_length]


def _least_bias(case: Case) -> Tensor:
    """The least finite number for every key of the third row, 0 elsewhere: it hides nothing, -inf does."""
    bias = torch.zeros(1, 1, case.query_length, case.key_length, dtype=torch.float64)
    bias[:, :, 2:3] = torch.finfo(getattr(torch, case.dtype)).min
    return bias


def _large_bias(case: Case) -> Tensor:
    """1e4 for one key, -1e4 for another; float16 holds both."""
    bias = torch.zeros(1, 1, 1, case.key_length, dtype=torch.float64)
    bias[..., :1], bias[..., -1:] = 1e4, -1e4
    return bias


def hides_by_place(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A mask_mod of positions alone: a band, and every fourth key."""
    return ((q - k < 9) & (k - q < 5)) | (k % 4 == 0)


def hides_by_score(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    """A score_mod that hides a third of the pairs, and every key from the second query."""
    hidden = ((q + k + h + b) % 3 == 0) | (q == 1)
    return score + torch.zeros_like(score).masked_fill(hidden, -torch.inf)


def scores_by_place(score: Tensor, b: Any, h: Any, q: Any, k: Any) -> Tensor:
    """A score_mod that puts a number of positions in the place of the score."""
    placed: Tensor = 0.1 * (k - q).to(score.dtype)
    return placed


def _ramp(x: Tensor) -> Tensor:
    """From -1 to 1 along the tokens."""
    return torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)[:, None]


def _with_a_third_zero(x: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[2]) % 3 != 0)[:, None], x, 0)


def _contents(change: Callable[[Tensor, Tensor, Tensor], Main], advice: str) -> Feature:
    return Feature((), ("contents",), contents=lambda c, q, k, v: change(q, k, v), advice=advice)


CONTENTS: Mapping[str, Feature] = MappingProxyType(
    {
        "zero_queries": _contents(
            lambda q, k, v: (q * 0, k, v), "Every score is 0 then, and every pair as visible as before"
        ),
        "zero_keys": _contents(
            lambda q, k, v: (q, _with_a_third_zero(k), v),
            "A key of zeros is a key: only masks say what is padding; divide by no norm that can be 0",
        ),
        "equal_keys": _contents(
            lambda q, k, v: (q, k[:, :, :1].expand_as(k).clone(), v), "All scores of a row are equal"
        ),
        "shorter_keys": _contents(
            lambda q, k, v: (q, k * (0.6 + 0.3 * _ramp(k)), v),
            "Lengths of keys count, unless the formula divides by them: norm nothing that it does not norm",
        ),
        "tiny": _contents(
            lambda q, k, v: (q * 1e-6, k * 1e-6, v),
            "An epsilon beside a norm or a normaliser must vanish beside small inputs too",
        ),
        "opposed": _contents(
            lambda q, k, v: (q + 7, k - 7, v), "All scores are far below 0: a running maximum starts at -inf, not at 0"
        ),
        "far_from_0": _contents(
            lambda q, k, v: (q + 7, k + 7, v), "Large terms that cancel lose the digits of the small difference"
        ),
        "large_keys": _contents(
            lambda q, k, v: (q, k * 8, v),
            "Keys may be as large as queries: bound no feature and no score that the formula does not bound",
        ),
        "large_queries": Feature(
            (),
            ("contents",),
            contents=lambda c, q, k, v: (q * (300 if c.dtype == "float64" else 30), k, v),  # exp ends at 709 and at 88
            advice="Subtract the row's maximum before exp, and take sums in float32 or better",
        ),
        "rising_scores": _contents(
            lambda q, k, v: (q / 8 + 5, k / 8 + 5 * _ramp(k), v),
            "A larger maximum in a later tile rescales what was summed before, every sum of it",
        ),
        "falling_scores": _contents(
            lambda q, k, v: (q / 8 + 5, k / 8 - 5 * _ramp(k), v),
            "The maximum of a row is that of all its tiles so far, not of the last one",
        ),
        "large_values": Feature(
            (),
            ("contents",),
            contents=lambda c, q, k, v: (q, k, v * (1e3 if c.dtype == "float16" else 1e7)),
            advice="Values are averaged as they are, however large",
        ),
    }
)
"""Contents by name. Recurrences are asked for those that keep the unit length of keys (`UNIT_LENGTH`)."""
UNIT_LENGTH = ("large_queries", "zero_queries", "zero_keys", "equal_keys", "shorter_keys", "large_values")


def swapped(x: Tensor, one: int, other: int) -> Tensor:
    """The same numbers, with these two axes exchanged in memory."""
    return x.transpose(one, other).contiguous().transpose(one, other)


def _sliced(x: Tensor) -> Tensor:
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7.0)
    view = room[..., 1::2]  # a last stride of 2, an odd storage offset
    view.copy_(x)
    return view


def _layout(change: Callable[[Tensor], Tensor]) -> Feature:
    return Feature(
        (),
        ("layout",),
        layout=change,
        advice="Read every operand through its own strides, or call .contiguous() on it first",
    )


LAYOUTS: Mapping[str, Feature] = MappingProxyType(
    {
        "transposed": _layout(lambda x: swapped(x, 1, 2)),  # [B, L, H, D] in memory
        "sliced": _layout(_sliced),
        "width_first": _layout(lambda x: swapped(x, 2, 3)),  # [B, H, D, L] in memory
    }
)

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "causal": _fixed("causal", causal=True),
        "top_left": _fixed("causal", causal=True, offset="top_left"),
        "bottom_right": _fixed("causal", causal=True, offset="bottom_right"),
        "int_offset": _fixed("causal", causal=True, offset=2),
        "negative_offset": _fixed("causal", causal=True, offset=-2),
        "batch_offset": Feature(
            ("causal",), ("causal", "offset"), build=lambda c, g: {"causal": True, "offset": _batch_offset(c, g)}
        ),
        "window": _fixed("window", window=(2, 1)),
        "left_window": _fixed("window", window=(3, None)),
        "right_window": _fixed("window", window=(None, 0)),
        "offset_window": _fixed("window", window=(1, 0), offset=1),
        "key_mask_left": _built("key_mask", "key_mask", _present_after),
        "key_mask_right": _built("key_mask", "key_mask", _present_before),
        "key_mask_holes": _built("key_mask", "key_mask", _holes),
        "key_lengths": _built("key_mask", "key_lengths", lambda c, g: _lengths(c, c.key_length)),
        "query_lengths": Feature(
            (), ("query_lengths",), build=lambda c, g: {"query_lengths": _lengths(c, c.query_length)}
        ),
        "segments": _built("segments", "segments", _segments),
        "mask": _built("mask", "mask", _allowed),
        "mask_per_item": _built("mask", "mask", lambda c, g: _allowed(c, g, c.batch, 1)),
        "mask_per_head": _built("mask", "mask", lambda c, g: _allowed(c, g, 1, c.num_heads)),
        "mask_of_each": _built("mask", "mask", lambda c, g: _allowed(c, g, c.batch, c.num_heads)),
        "mask_mod": _fixed("mask_mod", mask_mod=hides_a_third),
        "bias": _built("bias", "bias", lambda c, g: normal(g, 1, c.num_heads, c.query_length, c.key_length)),
        "bias_per_key": _built("bias", "bias", lambda c, g: normal(g, c.batch, 1, 1, c.key_length)),
        "bias_of_each": _built(
            "bias", "bias", lambda c, g: normal(g, c.batch, c.num_heads, c.query_length, c.key_length)
        ),
        "hiding_bias": _built("bias", "bias", _hiding_bias),
        "softcap": _fixed("softcap", softcap=1.5),
        "score_mod": _fixed("score_mod", score_mod=leans_on_distance),
        "sinks": _built("sinks", "sinks", lambda c, g: normal(g, c.num_heads)),
        "scale": _fixed("scale", scale=0.37),
        "negative_scale": _fixed("scale", scale=-0.37),
        "gqa": _sized("gqa", num_heads=4, num_kv_heads=2),
        "multi_query": _sized("gqa", num_heads=3, num_kv_heads=1),
        "value_dim": _sized("value_dim", value_dim=5),
        "query_dim": _sized("query_dim", head_dim=6),
        "longer_keys": _sized("cross_lengths", query_length=5, key_length=9),
        "longer_queries": _sized("cross_lengths", query_length=9, key_length=5),
        "one_query": _sized("cross_lengths", query_length=1, key_length=7),
    }
)


ENDS: Mapping[str, Feature] = MappingProxyType(
    {
        "offset=top_left": _fixed(offset="top_left"),
        "offset=bottom_right": _fixed(offset="bottom_right"),
        "offset=per_item": Feature((), ("offset",), build=lambda c, g: {"offset": _batch_offset(c, g)}),
        "offset=0d": Feature((), ("offset",), build=lambda c, g: {"offset": torch.tensor(1)}),
        "offset=apart": Feature((), ("offset",), build=lambda c, g: {"offset": _offsets_apart(c)}),
        "all_keys_present": _built("key_mask", "key_mask", lambda c, g: torch.ones(c.batch, c.key_length).bool()),
        "key_mask_strided": _built("key_mask", "key_mask", lambda c, g: _holes(c, g).repeat_interleave(2, 1)[:, ::2]),
        "key_mask_empty": _built("key_mask", "key_mask", lambda c, g: _all_but_first(c)),
        "key_lengths=ones": _built(
            "key_mask", "key_lengths", lambda c, g: torch.full((c.batch,), min(1, c.key_length), dtype=torch.int32)
        ),
        "key_lengths=apart": _built(
            "key_mask", "key_lengths", lambda c, g: _apart(c.batch, min(3, c.key_length), c.key_length)
        ),
        "key_lengths=ends": _built("key_mask", "key_lengths", lambda c, g: _apart(c.batch, 0, c.key_length)),
        "query_lengths=ends": Feature(
            (), ("query_lengths",), build=lambda c, g: {"query_lengths": _apart(c.batch, 0, c.query_length)}
        ),
        "segments=turns": _built("segments", "segments", lambda c, g: _turns(c, torch.int32)),
        "segments=bytes": _built("segments", "segments", lambda c, g: _turns(c, torch.int64, (0, 256, 255))),
        "mask_one_row": _shaped("mask", lambda c: (1, 1, 1, c.key_length)),
        "mask_one_column": _shaped("mask", lambda c: (1, 1, c.query_length, 1)),
        "mask_per_item_and_key": _shaped("mask", lambda c: (c.batch, 1, 1, c.key_length)),
        "mask_per_head_and_row": _shaped("mask", lambda c: (1, c.num_heads, c.query_length, 1)),
        "mask_hides_nothing": _built("mask", "mask", lambda c, g: torch.ones(c.query_length, c.key_length).bool()),
        "bias=zero": _built("bias", "bias", lambda c, g: torch.zeros(1, 1, 1, 1, dtype=torch.float64)),
        "bias=rows": _shaped("bias", lambda c: (1, 1, c.query_length, 1)),
        "bias=heads": _shaped("bias", lambda c: (c.batch, c.num_heads, 1, 1)),
        "bias=items": _shaped("bias", lambda c: (c.batch, 1, c.query_length, c.key_length)),
        "bias=shared": _shaped("bias", lambda c: (1, 1, c.query_length, c.key_length)),
        "bias=head_and_key": _shaped("bias", lambda c: (1, c.num_heads, 1, c.key_length)),
        # of a softmax, from which a constant may be taken away: any other formula adds it to scores whose digits it swallows
        "bias=least": Feature(("bias", "lse"), ("bias",), build=lambda c, g: {"bias": _least_bias(c)}),
        "gates=strong": Feature(("gates",), ("gates",)),
        "gates=weak": Feature(("gates",), ("gates",)),
        "bias=large": _built("bias", "bias", lambda c, g: _large_bias(c)),
        "score_mod_hides": _fixed("score_mod", score_mod=hides_by_score),
        "score_mod_of_places": _fixed("score_mod", score_mod=scores_by_place),
        "mask_mod_by_place": _fixed("mask_mod", mask_mod=hides_by_place),
        "sinks=200": _built("sinks", "sinks", lambda c, g: torch.full((c.num_heads,), 200.0, dtype=torch.float64)),
        "sinks=-inf": _built(
            "sinks", "sinks", lambda c, g: torch.full((c.num_heads,), -torch.inf, dtype=torch.float64)
        ),
        "sinks=0": _built("sinks", "sinks", lambda c, g: torch.zeros(c.num_heads, dtype=torch.float64)),
    }
)
"""Arguments at the ends of their ranges, and masks and biases of every shape that broadcasts."""
_NUMBERED = {"window": ("window",), "offset": (), "softcap": ("softcap",), "scale": ("scale",)}
"""Arguments that a label may give a number, and the askables that they need."""


def feature(label: str) -> Feature:
    """The feature of a label, or of an argument with its number as "window=(64, 0)"; `InvalidInput` for any other word."""
    for known in (FEATURES, ENDS, CONTENTS, LAYOUTS):
        if label in known:
            return known[label]
    name, equals, text = label.partition("=")
    if equals and name in _NUMBERED:
        try:
            return _fixed(*_NUMBERED[name], **{name: ast.literal_eval(text)})
        except (SyntaxError, ValueError):
            raise InvalidInput(f"case: {name} takes a number or a tuple of numbers, got {text!r}") from None
    raise InvalidInput(
        f"case: no feature is called {label!r}; {nearest(label, [*FEATURES, *ENDS, *CONTENTS, *LAYOUTS])}"
    )


def compatible(*labels: str) -> bool:
    """Whether the labels can be used in one call: no two set the same argument or the same size."""
    words = [word for label in labels for word in (*feature(label).sets, *feature(label).sizes)]
    return len(words) == len(set(words))
