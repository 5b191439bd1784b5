"""How far an answer may be from the float64 definition, and why. Needs torch.

The rule (docs/contract.md, "Accuracy"): at most twice the error of the plain formula in the same dtype, plus a
bound derived from the dtype's epsilon and the reduction length.

    limit = 2 * E + R

E, the plain formula's error, is measured: the definition itself is run with everything in that dtype
on the same inputs and compared with its float64 run. It carries the conditioning of the case (large
scores, long recurrences), which no constant could. In float64 there is nothing to compare with, so
the float32 run stands in, scaled by u64 / u32: to first order rounding errors are proportional to u.

R, the derived part, covers a luckily small E. With u = eps / 2 and gamma_n = n u / (1 - n u)
(Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1: the relative error bound
of a sum of n products) it is

    R = (gamma_n(u_acc) + 2 u_out) * m

    n      = Dq + Dk + Dv + 2 Lq + 2 Lk + 16: every sum that a forward and its backward take (over widths,
             over keys, in the backward also over queries), and 16 elementwise steps;
    u_acc  of the accumulation type, float32 or the dtype if wider: the contract demands as much;
    u_out  of the dtype itself: storing the result rounds once, one operand may have been rounded once;
    m      the largest magnitude of the exact result, and for outputs also of the values that are averaged.

A tolerance is never widened to make a check pass; an answer outside is a fault or a KnownFailure.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = {name: torch.finfo(getattr(torch, name)).eps / 2 for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest absolute error allowed, and a sentence that says where it comes from."""

    limit: float
    origin: str


def accumulation_unit(dtype: str) -> float:
    """u of the type that sums are taken in: float32, or the dtype where it is wider."""
    return min(UNIT[dtype], UNIT["float32"])


def gamma(n: int, unit: float) -> float:
    """n u / (1 - n u), the relative error bound of a sum of n products."""
    return n * unit / (1 - n * unit)


def derived(dtype: str, terms: int, magnitude: float) -> float:
    """R of the module docstring, for a result whose largest magnitude is `magnitude`."""
    return (gamma(terms, accumulation_unit(dtype)) + 2 * UNIT[dtype]) * magnitude


def bound(dtype: str, *, exact: Tensor, plain: Tensor, plain_dtype: str, terms: int, magnitude: float = 0.0) -> Bound:
    """The bound on errors against `exact` (float64) in `dtype`.

    plain: the definition's result computed in `plain_dtype` (the same dtype, or float32 standing in for
    float64). magnitude: of what is averaged, where it may exceed the result's own.
    """
    rescale = UNIT[dtype] / UNIT[plain_dtype]
    measured = largest_error(plain, exact) * rescale
    if not measured < float("inf"):  # the plain formula overflowed: it excuses nothing
        measured = 0.0
    m = max(magnitude, largest(exact))
    rest = derived(dtype, terms, m)
    scaled = "" if plain_dtype == dtype else f" (measured in {plain_dtype}, times {rescale:.1e})"
    return Bound(
        2 * measured + rest,
        f"2 x {measured:.2e}, the plain formula's error in {dtype}{scaled}, "
        f"+ {rest:.2e}, rounding over {terms} terms of size {m:.3g}",
    )


def rounding_bound(dtype: str, *, terms: int, magnitude: float) -> Bound:
    """The bound between two runs of one variant that should agree: each may err by R."""
    rest = 2 * derived(dtype, terms, magnitude)
    return Bound(rest, f"2 x rounding over {terms} terms of size {magnitude:.3g} in {dtype}")


def largest(x: Tensor) -> float:
    """The largest finite magnitude in `x`, 0 where there is none."""
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def largest_error(got: Tensor, exact: Tensor) -> float:
    """max |got - exact| in float64, where equal infinities agree and any NaN counts as infinite."""
    if not exact.numel():
        return 0.0
    return float(differences(got, exact).max())


def differences(got: Tensor, exact: Tensor) -> Tensor:
    """|got - exact| in float64 by element; equal infinities differ by 0, a NaN by infinity."""
    a, b = got.detach().to(torch.float64), exact.detach().to(torch.float64)
    gap = torch.where(a == b, 0.0, (a - b).abs())
    return gap.nan_to_num(nan=float("inf"), posinf=float("inf"))
