"""The likeliest cause of a wrong answer: the definition of which other request it is the answer to. Needs torch.

An answer that equals the definition's with the window one wider, with a mask dropped or with the scale applied twice says what is
wrong. Each hypothesis changes the request; the first whose definition the answer agrees with is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, differences
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.features import feature
from attnlab.conformance.oracle.inputs import Inputs, define

ITEMS = ("key_mask", "key_lengths", "query_lengths", "mask", "bias", "segments", "offset")
"""Arguments that may differ by item."""
MEANING = {
    "causal": "the key's position is at most the query's",
    "offset": "query i stands at position i + offset",
    "window": "both counts include their end, from the query's position on; None has no end",
    "key_mask": "True is present",
    "key_lengths": "keys from the length on are padding",
    "query_lengths": "rows from the length on are 0",
    "segments": "query and key need the same id, and -1 is padding",
    "mask": "True may attend",
    "mask_mod": "it is given item, head and positions of the whole call",
    "bias": "it is added after scale, softcap and score_mod",
    "softcap": "softcap * tanh(score / softcap), after scale and before score_mod and bias",
    "score_mod": "it comes after scale and softcap, before bias, with item, head and positions of the whole call",
    "sinks": "one logit for each query head joins the normaliser and carries no value",
    "scale": "it takes the place of the formula's own",
}
"""What an argument means, in a few words."""

Change = tuple[str, Inputs]


def cause(variant: Any, inputs: Inputs, got: Tensor, exact: Tensor, limit: Bound, rows: list[int] | None = None) -> str:
    """A sentence that names the likeliest cause of a wrong out, "" where no hypothesis fits."""
    with torch.no_grad():
        for name, default, other in _without_options(variant, inputs.case):
            if _agrees(other, inputs, got, exact, limit, rows):
                return f"The answer is that of {name}={default!r}, the default: the option {name} is dropped"
        for words, asked in _hypotheses(variant, inputs):
            if _agrees(variant, asked, got, exact, limit, rows):
                return words
    return _by_its_numbers(got, exact, limit)


def advice(
    variant: Any, inputs: Inputs, got: Tensor, exact: Tensor, limit: Bound, rows: list[int] | None = None
) -> str:
    """The likeliest cause, else what a failure at these contents or this layout usually means, else what the arguments mean."""
    usual = " ".join(filter(None, (feature(label).advice for label in inputs.case.features)))
    return cause(variant, inputs, got, exact, limit, rows) or usual or rules_of(inputs)


def rules_of(inputs: Inputs) -> str:
    """What the arguments of a request mean."""
    named = [f"{name}: {MEANING[name]}" for name in MEANING if inputs.arguments.get(name) not in (None, False)]
    return "; ".join(named)


def _agrees(variant: Any, other: Inputs, got: Tensor, exact: Tensor, limit: Bound, rows: list[int] | None) -> bool:
    try:
        theirs = define(variant, other, rows=rows)["out"]
    except Exception:  # a definition of anybody's: this hypothesis says nothing then
        return False
    if theirs.shape != got.shape or _gap(theirs, exact) <= 4 * limit.limit:
        return False
    return _gap(theirs, got) <= 2 * limit.limit


def _gap(a: Tensor, b: Tensor) -> float:
    return float(differences(a, b).max()) if a.numel() else 0.0


def _without_options(variant: Any, case: Case) -> Iterator[tuple[str, Any, Any]]:
    """The variant as its definition would see it with one option at its default."""
    parameters = signature(type(variant)).parameters
    for name in json.loads(case.options) if case.options else ():
        default = parameters[name].default if name in parameters else None
        other = copy(variant)
        other.options = {**variant.options, name: default}
        yield name, default, other


def of_lse(got: Tensor, exact: Tensor, limit: Bound) -> str:
    """A sentence that names the likeliest cause of a wrong lse."""
    for words, theirs in (
        ("It is the logarithm to base 2: multiply it by ln 2", exact / math.log(2)),
        ("It is the logarithm to base 10: multiply it by ln 10", exact / math.log(10)),
        ("It has the other sign", -exact),
        ("It is the sum itself: take its natural logarithm", exact.exp()),
    ):
        if got is not None and got.shape == exact.shape and _gap(got, theirs) <= 4 * limit.limit:
            return words
    return "Natural logarithm, after scale, softcap, bias and sinks, with the row maximum added back"


def _hypotheses(variant: Any, inputs: Inputs) -> Iterator[Change]:
    """What the request may have been read as."""
    yield from _dropped(inputs)
    yield from _rescaled(variant, inputs)
    yield from _moved(inputs)
    yield from _inverted(inputs)
    yield from _misplaced(inputs)
    yield from _padding_read(inputs)


def _dropped(inputs: Inputs) -> Iterator[Change]:
    for name, x in inputs.arguments.items():
        if x is not None and x is not False and name not in ("gates", "offset"):
            yield f"The answer is that of a call without {name}=: it is dropped here", inputs.without(name)


def _rescaled(variant: Any, inputs: Inputs) -> Iterator[Change]:
    own = variant.default_scale()
    if own is None:
        return
    scale = inputs.arguments.get("scale")
    used = own if scale is None else scale
    for words, other in (
        ("applied twice", used * own),
        ("applied twice", used * used),
        ("left out", 1.0),
        ("taken from another width", inputs.value.shape[-1] ** -0.5),
        ("taken from another width", inputs.query.shape[-1] ** -0.5),
        ("taken from the width of all heads", used / inputs.query.shape[1] ** 0.5),
        ("inverted", 1 / used if used else 1.0),
        ("its square root", math.copysign(abs(used) ** 0.5, used)),
    ):
        if other != used:
            changed = inputs.with_tensors(scale=other)
            yield (
                f"The answer is the definition's with scale={other:.6g} in the place of {used:.6g}: the scale is {words}",
                changed,
            )


def _moved(inputs: Inputs) -> Iterator[Change]:
    arguments = inputs.arguments
    if arguments.get("window") is not None:
        left, right = arguments["window"]
        for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1)):
            if (
                (left is None and a)
                or (right is None and b)
                or (left is not None and left + a < 0)
                or (right is not None and right + b < 0)
            ):
                continue
            other = (None if left is None else left + a, None if right is None else right + b)
            words = f"The answer is that of window={other}, not {(left, right)}: the window is off by one; {MEANING['window']}"
            yield words, inputs.with_tensors(window=other)
    if arguments.get("causal") or arguments.get("window") is not None:
        now = arguments.get("offset")
        for word in ("top_left", "bottom_right"):
            if now != word:
                yield f"The answer is that of offset={word!r}: {MEANING['offset']}", inputs.with_tensors(offset=word)
        if not isinstance(now, str):
            for by in (-1, 1):
                words = f"The answer is that of a query which stands {'before' if by < 0 else 'after'} its own position: {MEANING['causal']}"
                yield words, inputs.with_tensors(offset=(0 if now is None else now) + by)


def _inverted(inputs: Inputs) -> Iterator[Change]:
    for name in ("mask", "key_mask"):
        x = inputs.arguments.get(name)
        if isinstance(x, Tensor):
            yield (
                f"The answer is that of the inverted {name}: True means {'may attend' if name == 'mask' else 'present'}",
                inputs.with_tensors(**{name: ~x}),
            )
    bias = inputs.arguments.get("bias")
    if isinstance(bias, Tensor):
        yield "The answer is that of the negative bias", inputs.with_tensors(bias=-bias)


def _misplaced(inputs: Inputs) -> Iterator[Change]:
    """Heads and items that read their neighbours'."""
    heads, kv_heads = inputs.query.shape[1], inputs.key.shape[1]
    if 1 < kv_heads < heads:
        order = [h % kv_heads * (heads // kv_heads) + h // kv_heads for h in range(heads)]
        words = "The answer is that of query heads which read key/value head h % Hkv: head h reads h // (Hq // Hkv)"
        whole = inputs.with_tensors(
            **{n: getattr(inputs, n).repeat_interleave(heads // kv_heads, 1)[:, order] for n in ("key", "value")}
        )
        yield words, whole
    if inputs.query.shape[0] > 1:
        for name in ITEMS:
            x = inputs.arguments.get(name)
            if isinstance(x, Tensor) and x.dim() and x.shape[0] > 1:
                for words, other in (("its neighbour's", x.roll(1, 0)), ("the first one's", x[:1].expand_as(x))):
                    yield f"The answer is that of items which read {words} {name}", inputs.with_tensors(**{name: other})
    for name in ("mask", "bias", "sinks"):
        x = inputs.arguments.get(name)
        axis = 0 if name == "sinks" else 1
        if isinstance(x, Tensor) and x.dim() > axis and x.shape[axis] > 1 and (name == "sinks" or x.dim() == 4):
            first = x.narrow(axis, 0, 1).expand_as(x)
            for words, other in (("their neighbour's", x.roll(1, axis)), ("the first one's", first)):
                yield f"The answer is that of heads which read {words} {name}", inputs.with_tensors(**{name: other})


def _padding_read(inputs: Inputs) -> Iterator[Change]:
    """Absent keys that hold 0, as validation leaves them, and take part."""
    names = [n for n in ("key_mask", "key_lengths") if n in inputs.arguments]
    if not names:
        return
    keys = torch.arange(inputs.key.shape[2], device=inputs.key.device)
    mask, lengths = inputs.arguments.get("key_mask"), inputs.arguments.get("key_lengths")
    present = mask if mask is not None else keys < torch.as_tensor(lengths).view(-1, 1)
    cleared = inputs.changed(lambda x: torch.where(present[:, None, :, None], x, 0), "key", "value").without(*names)
    yield "The answer is that of absent keys which hold 0 and take part: they still weigh in the normaliser", cleared


def _by_its_numbers(got: Tensor, exact: Tensor, limit: Bound) -> str:
    """What the numbers themselves say."""
    a, b = got.detach().double(), exact.detach().double()
    if not bool(a.isfinite().all()):
        return (
            "It is not finite: a row without a key divided by 0, or a large score was not reduced by its row's maximum"
        )
    wrong = (differences(got, exact) > limit.limit).any(-1)
    if not bool((differences(got, exact) > 1e-2 * max(1.0, float(b.abs().max()))).any()):
        return ""  # digits are lost, which no rule of the call explains
    if bool((b[wrong] == 0).all()):
        return "Only rows that are 0 by definition are wrong: a query that sees no key gets 0"
    size = b.square().sum(-1, keepdim=True)
    ratio = torch.where(size > 0, (a * b).sum(-1, keepdim=True) / torch.where(size > 0, size, 1), 1)
    if _gap(a, ratio * b) <= 4 * limit.limit and bool((ratio - 1).abs().max() > 0.01):
        one = float(ratio.flatten()[0])
        alike = bool(((ratio - one).abs() < 1e-3).all())
        many = (
            f"every row is {one:.4g} times the definition's" if alike else "every row is a multiple of the definition's"
        )
        return f"{many[0].upper()}{many[1:]}: numerator and normaliser do not sum the same weights"
    counts = [int(wrong.any(dim=tuple(d for d in range(3) if d != axis)).sum()) for axis in range(3)]
    names = ("items", "heads", "rows")
    only = [f"{n} of {wrong.shape[axis]} {names[axis]}" for axis, n in enumerate(counts) if n < wrong.shape[axis]]
    return f"It is wrong in {' and '.join(only)} only" if only else ""
