"""Features of a call by label: its arguments and the sizes that go with them.

A label is one way to use one askable ("key_mask_left", "bottom_right"). `askables` are the capabilities
it needs, `sets` the arguments it sets: two labels that set the same argument cannot be combined. Needs
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from attnlab.conformance.oracle.cases import Case

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Feature:
    """One way to use an askable: what it needs, the sizes it changes, and how its arguments are made."""

    askables: tuple[str, ...]
    sets: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    build: Callable[[Case, Generator], Arguments] | None = None


def _fixed(*askables: str, **arguments: Any) -> Feature:
    return Feature(askables, tuple(arguments), build=lambda case, generator: dict(arguments))


def _built(askable: str, argument: str, build: Callable[[Case, Generator], Any]) -> Feature:
    return Feature((askable,), (argument,), build=lambda case, generator: {argument: build(case, generator)})


def _sized(*askables: str, **sizes: int) -> Feature:
    return Feature(askables, sizes=sizes)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal float64 numbers on the CPU: every dtype and device is cast from the same ones."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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


def compatible(*labels: str) -> bool:
    """Whether the labels can be used in one call: no two set the same argument or the same size."""
    words = [word for label in labels for word in (*FEATURES[label].sets, *FEATURES[label].sizes)]
    return len(words) == len(set(words))
