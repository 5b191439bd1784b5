"""Comparisons that fail with a whole message. Needs torch; used by every check.

A message reads: who (variant), where (case, dtype, device), what differed and at which index, what was
observed and what was expected, the bound and where it comes from, what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.cases import Case
from attnlab.conformance.tolerances import Bound, differences

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
    """`dot_product (float32 on cpu, causal+gqa, B=2 Hq=4 Hkv=2 Lq=5 Lk=9 Dq=8 Dk=8 Dv=8, seed 0)`."""
    name = getattr(variant, "name", "") or type(variant).__name__
    return (
        f"{name} ({case.dtype} on {case.device}, {'+'.join(case.features) or 'plain'}"
        f"{', ' + case.note if case.note else ''}, B={case.batch} Hq={case.num_heads} Hkv={case.num_kv_heads} "
        f"Lq={case.query_length} Lk={case.key_length} Dq={case.head_dim} Dk={case.key_dim} Dv={case.value_dim}, "
        f"seed {case.seed})"
    )


def index_of(what: str, flat: int, shape: torch.Size) -> str:
    """`[b=0, h=1, i=3, d=2]` for a flat index."""
    numbers: list[int] = []
    for size in reversed(shape):
        numbers.append(flat % size)
        flat //= size
    numbers.reverse()
    names = AXES.get(what.split(" ")[-1])
    if names is not None and len(names) == len(numbers):
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
    advice: str,
    inputs: Any = None,
) -> None:
    """Fail unless every element of `got` is within `limit` of `exact`.

    what: "out", "weights", "gradient of key", ...; versus: what `exact` is, in words; inputs: those of the call,
    where the message of an out, weights or lse should say which keys the query sees.
    """
    demand(
        got is not None, variant, case, f"{what} was asked for and is None", "Return it in AttentionOutput"
    )
    assert got is not None
    demand(
        got.shape == exact.shape,
        variant,
        case,
        f"{what} has shape {list(got.shape)}, expected {list(exact.shape)}",
        "docs/contract.md says each shape; `attnlab contract` prints it",
    )
    if not exact.numel():
        return
    gap = differences(got, exact)
    worst = int(gap.argmax())
    if float(gap.flatten()[worst]) <= limit.limit:
        return
    over = int((gap > limit.limit).sum())
    a, b = float(got.detach().flatten()[worst]), float(exact.detach().flatten()[worst])
    sees = "" if inputs is None else _what_it_sees(inputs, worst, got.shape)
    raise AssertionError(
        f"{where(variant, case)}: {what} differs from {versus} at {index_of(what, worst, got.shape)}: "
        f"got {_apart(a, b)}, expected {_apart(b, a)}{sees}, error {float(gap.flatten()[worst]):.3g} > bound {limit.limit:.3g} "
        f"({limit.origin}); {over} of {gap.numel()} elements are outside. {advice}"
    )


def _apart(x: float, other: float) -> str:
    """`x` with six digits, or with as many as tell it from `other`."""
    return next((f"{x:.{n}g}" for n in range(6, 17) if f"{x:.{n}g}" != f"{other:.{n}g}"), f"{x:.17g}")


def _what_it_sees(inputs: Any, flat: int, shape: torch.Size) -> str:
    """` (this query sees no key)`, or the keys that it sees, for the row that a flat index of out or weights is in."""
    b, h, i = (int(x) for x in torch.unravel_index(torch.tensor(flat), shape)[:3])
    keys = inputs.visible()[b, h, i].nonzero().flatten().tolist()
    if not keys:
        return " (a dead row: this query sees no key)"
    shown = ", ".join(map(str, keys[:12])) + (", ..." if len(keys) > 12 else "")
    return f" (this query sees key{'' if len(keys) == 1 else 's'} {shown} of {inputs.key.shape[2]})"


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
