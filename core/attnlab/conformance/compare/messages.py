"""Comparisons that fail with a whole message. Needs torch; used by every check.

A message reads: who (variant), where (case, dtype, device), what differed and at which index, what was
observed and what was expected, the bound and where it comes from, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, differences
from attnlab.conformance.oracle.cases import Case

AXES = {
    "out": ("b", "h", "i", "d"),
    "weights": ("b", "h", "i", "j"),
    "lse": ("b", "h", "i"),
    "query": ("b", "h", "i", "d"),
    "key": ("b", "h", "j", "d"),
    "value": ("b", "h", "j", "d"),
    "bias": ("b", "h", "i", "j"),
    "sinks": ("h",),
}


def where(variant: Any, case: Case) -> str:
    """`dot_product (batch=2 heads=4/2 lengths=5/9 width=8 causal float32)`."""
    return f"{getattr(variant, 'name', '') or type(variant).__name__} ({case.id})"


def index_of(what: str, flat: int, shape: torch.Size, rows: Sequence[int] | None = None) -> str:
    """`[b=0, h=1, i=3, d=2]` for a flat index; `rows` are the query rows that the tensor holds, where it does not hold all."""
    numbers: list[int] = []
    for size in reversed(shape):
        numbers.append(flat % size)
        flat //= size
    numbers.reverse()
    names = AXES.get(what.split(" ")[-1])
    if names is not None and len(names) == len(numbers):
        if rows is not None and "i" in names:
            numbers[names.index("i")] = rows[numbers[names.index("i")]]
        return "[" + ", ".join(f"{n}={x}" for n, x in zip(names, numbers, strict=True)) + "]"
    return "[" + ", ".join(map(str, numbers)) + "]"


def demand(condition: bool, variant: Any, case: Case, fault: str, advice: str) -> None:
    """Fail with `fault` and `advice` unless `condition`."""
    if not condition:
        raise AssertionError(f"{where(variant, case)}: {fault}. {advice}")


def demand_close(
    got: Tensor | None,
    exact: Tensor,
    limit: Bound,
    variant: Any,
    case: Case,
    *,
    what: str,
    versus: str,
    advice: str | Callable[[], str],
    inputs: Any = None,
    rows: Sequence[int] | None = None,
) -> None:
    """Fail unless every element of `got` is within `limit` of `exact`.

    what: "out", "weights", "gradient of key", ...; versus: what `exact` is, in words; advice: a sentence, or a function that
    finds one once the comparison has failed; inputs: those of the call, where the message of an out, weights or lse should say
    which keys the query sees; rows: the query rows that the tensors hold, where they do not hold all.
    """
    demand(got is not None, variant, case, f"{what} was asked for and is None", "Return it in AttentionOutput")
    assert got is not None
    demand(
        got.shape == exact.shape,
        variant,
        case,
        f"{what} has shape {list(got.shape)}, expected {list(exact.shape)}",
        "out is [B, Hq, Lq, Dv], weights [B, Hq, Lq, Lk], lse [B, Hq, Lq], a gradient has its tensor's shape",
    )
    if not exact.numel():
        return
    gap = differences(got, exact)
    worst = int(gap.argmax())
    if float(gap.flatten()[worst]) <= limit.limit:
        return
    over = int((gap > limit.limit).sum())
    a, b = float(got.detach().flatten()[worst]), float(exact.detach().flatten()[worst])
    sees = "" if inputs is None else _what_it_sees(variant, inputs, worst, got.shape)
    raise AssertionError(
        f"{where(variant, case)}: {what} differs from {versus} at {index_of(what, worst, got.shape, rows)}: "
        f"got {_apart(a, b)}, expected {_apart(b, a)}{sees}, error {float(gap.flatten()[worst]):.3g} > bound {limit.limit:.3g} "
        f"({limit.origin}); {over} of {gap.numel()} elements are outside. {advice if isinstance(advice, str) else advice()}".strip()
    )


def _apart(x: float, other: float) -> str:
    """`x` with six digits, or with as many as tell it from `other`."""
    return next((f"{x:.{n}g}" for n in range(6, 17) if f"{x:.{n}g}" != f"{other:.{n}g}"), f"{x:.17g}")


def _what_it_sees(variant: Any, inputs: Any, flat: int, shape: torch.Size) -> str:
    """` (this query sees no key)`, or the keys that it sees, for the row that a flat index of out or weights is in.

    By the arguments of the call; where the formula itself gives no weight to some of those, the ones that it does are told.
    """
    b, h, i = (int(x) for x in torch.unravel_index(torch.tensor(flat), shape)[:3])
    keys = inputs.visible()[b, h, i].nonzero().flatten().tolist()
    if not keys:
        return " (a dead row: this query sees no key)"
    told = f"this query sees {_listed(keys)} of {inputs.key.shape[2]}"
    weighed = _weighed(variant, inputs, b, h, i)
    if weighed is None or set(weighed) >= set(keys):
        return f" ({told})"
    return f" (by the call's masks {told}; the formula gives weight to {_listed(weighed)})"


def _weighed(variant: Any, inputs: Any, b: int, h: int, i: int) -> list[int] | None:
    """The keys to which the definition gives a row any weight; None where it does not tell."""
    from attnlab.conformance.oracle.inputs import define

    try:
        with torch.no_grad():
            weights = define(variant, inputs).get("weights")
    except Exception:  # a definition of anybody's: this only adds to a message
        return None
    return None if weights is None else weights[b, h, i].nonzero().flatten().tolist()


def _listed(keys: list[int]) -> str:
    """`no key`, `key 3`, `keys 0, 1, 2, ...`."""
    if not keys:
        return "no key"
    shown = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
    return f"key{'' if len(keys) == 1 else 's'} {shown}"


def demand_zero(got: Tensor, variant: Any, case: Case, *, what: str, why: str, advice: str) -> None:
    """Fail unless every element is exactly 0."""
    bad = (got.detach() != 0).flatten()  # NaN != 0 holds as well
    if not bool(bad.any()):
        return
    first = int(bad.to(torch.int8).argmax())
    raise AssertionError(
        f"{where(variant, case)}: {what} must be exactly 0 ({why}), got "
        f"{float(got.detach().flatten()[first]):.6g} at {index_of(what, first, got.shape)}; {int(bad.sum())} of "
        f"{bad.numel()} elements are not 0. {advice}"
    )


def demand_finite(got: Tensor, variant: Any, case: Case, *, what: str, why: str, advice: str) -> None:
    """Fail where anything is NaN or infinite."""
    bad = ~got.detach().isfinite().flatten()
    if not bool(bad.any()):
        return
    first = int(bad.to(torch.int8).argmax())
    raise AssertionError(
        f"{where(variant, case)}: {what} must be finite ({why}), got {float(got.detach().flatten()[first])} at "
        f"{index_of(what, first, got.shape)}; {int(bad.sum())} of {bad.numel()} elements are not finite. {advice}"
    )
