"""Sums in half precision, by contents that show them. Needs torch.

A bound that leaves room for the plain formula in half precision leaves room for sums in half precision too: on ordinary contents
these err five to seven times as much as one rounding does. So contents are chosen on which correct steps hardly err:

- equal keys: the weights of a row are one number, whose rounding scales out as a whole, and values that cancel: the first half of
  them is near 1 and the second near -1. Partial sums are of size 1 or n, what is left of them is 20 times smaller.
- unequal weights over values near 1: a normaliser that is summed in half precision errs by the rounding of each partial sum.
- scores of 128 and a little: the little decides the weights, and a sum over the width that is kept in half precision loses it.

The bound: what summing in float32 costs, measured and derived as in `tolerances` for float32,

    2 E32 + gamma_n(u32) m

with m the largest sum of magnitudes, plus what half precision may cost: the result is stored with one rounding and one operand
may have been rounded once, 2 u |out|; and where weights of a row differ, each may be rounded once before it meets its value
(fused kernels do so), u sum_j w_j |v_j|. A running sum of n terms in half precision errs by about u |partial sum| sqrt(n / 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import mixed
from attnlab.conformance.checks._stepping import NEEDS, feed
from attnlab.conformance.compare.advice import of_precision
from attnlab.conformance.compare.comparer import Comparer
from attnlab.conformance.compare.tolerances import UNIT, Bound, bound, largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.features import normal
from attnlab.conformance.oracle.inputs import Inputs, define, draw, reduction_terms
from attnlab.conformance.running.check import Check, Scope

HALF = ("bfloat16", "float16")
ADVICE = (
    "Take every sum (over widths, over keys, of a normaliser, of a state) in float32 or better, and store the result "
    "once; between tiles and between steps too"
)
CANCELLING, UNEQUAL, FAR = "values that cancel", "unequal weights", "scores of 128 and a little"
STATE = "values that cancel, through a state"


def check_half_precision_accumulates_in_float32(variant: Any, case: Case) -> None:
    """On contents where one rounding hardly errs, half precision errs by what float32 sums and single roundings explain."""
    inputs = _contents(draw(case, variant))
    require_exact(variant, inputs)
    with torch.no_grad():
        if case.note == STATE:
            got = feed(variant, inputs, [24] * (case.query_length // 24 - 1) + [1] * 24)[0]
        else:
            got = inputs.run(variant).out
        visible = inputs.visible()
        defined = define(variant, inputs, visible=visible)
        single = define(variant, inputs, dtype=torch.float32, visible=visible)["out"]
        apart = define(variant, inputs.with_tensors(value=inputs.value.abs()), visible=visible)["out"]
    rows = _small_rows(defined["out"])
    magnitude = max(largest(apart), largest(inputs.value))
    exact, spread = defined["out"][:, :, rows], _spread(defined.get("weights"), visible, inputs)
    limit = _limit(case, exact, single[:, :, rows], magnitude, spread)
    versus, advice = "the float64 definition of the same numbers", of_precision(variant, case, ADVICE)
    Comparer(variant, inputs).close(got[:, :, rows], exact, limit, versus, advice, rows=rows)


def _small_rows(exact: Tensor) -> list[int]:
    """The rows where sums have cancelled to a quarter of the largest row's size; all of them where none has."""
    sizes = exact.abs().amax(dim=(0, 1, 3))
    small = sizes <= sizes.max() / 4
    return [i for i, one in enumerate(small.tolist()) if one] or list(range(exact.shape[2]))


def _limit(case: Case, exact: Tensor, single: Tensor, magnitude: float, spread: float) -> Bound:
    """The bound of the module docstring."""
    terms = reduction_terms(case)
    wide = bound("float32", exact=exact, plain=single, plain_dtype="float32", terms=terms, magnitude=magnitude)
    stored = 2 * UNIT[case.dtype] * largest(exact) + UNIT[case.dtype] * spread
    return Bound(wide.limit + stored, f"{stored:.1e} for single roundings in {case.dtype}, + in float32 {wide.origin}")


def _spread(weights: Tensor | None, visible: Tensor, inputs: Inputs) -> float:
    """The largest sum of |weight x value| of a row whose weights differ, 0 where they are one number or none."""
    if weights is None:
        return 0.0
    low = torch.where(visible, weights, torch.inf).amin(-1)
    top = torch.where(visible, weights, -torch.inf).amax(-1)
    rows = (top - low > 1e-9 * top.abs())[..., None]
    sums = mixed(weights.abs(), inputs.with_tensors(value=inputs.value.abs()))
    return largest(torch.where(rows, sums, 0))


def _contents(inputs: Inputs) -> Inputs:
    """The contents that the case's note names."""
    case = inputs.case
    near_one = 1 + inputs.value.abs() / 16
    if case.note == UNEQUAL:
        return inputs.with_tensors(key=inputs.key * 0.3, value=near_one)
    if case.note == FAR:
        wide = case.key_dim // 2
        query, key = inputs.query * 0.5, inputs.key.clone()
        query[..., :wide], key[..., :wide] = 4.0, 8.0
        return inputs.with_tensors(query=query, key=key)
    same = inputs.key[:, :, :1].expand(inputs.key.shape).clone()
    value = _cancelling(inputs.key, case.value_dim, case.seed)
    # A state that forgets within a few tokens sums no more than those: rates are slowed down.
    gates = {n: x / (128 if bool((x <= 0).all()) else 32) for n, x in (inputs.arguments.get("gates") or {}).items()}
    return inputs.with_tensors(key=same, value=value, **({"gates": gates} if gates else {}))


def _cancelling(like: Tensor, width: int, seed: int) -> Tensor:
    """Numbers from 1 up in the first half of the tokens, from -1 down in the second, `[B, H, L, width]`."""
    length = like.shape[2]
    x = 1 + normal(torch.Generator().manual_seed(seed + 9), *like.shape[:3], width).abs() / 16
    signs = torch.where(torch.arange(length) < length // 2, 1.0, -1.0)[:, None]
    return (x * signs).to(like.device, like.dtype)


def _sums(scope: Scope) -> Iterable[Case]:
    # A stepwise definition walks over the keys for each query.
    rows, longest, square = (2, 256, 72) if scope.stepwise else (16, 1024, 96)
    if scope.family == "feature_map":  # errors of many features average out: only sums past 2^11 show in float16
        longest = 2048
    for dtype in (d for d in HALF if d in scope.dtypes):
        one: dict[str, Any] = {"head_dim": 32, "key_dim": 32, "value_dim": 32, "batch": 1, "dtype": dtype}
        far = {"head_dim": 64, "key_dim": 64, "value_dim": 64}  # whose scale is a power of two
        for note in (CANCELLING, UNEQUAL, FAR) if scope.family == "score" else (CANCELLING, UNEQUAL):
            for length in (64,) if note == FAR else (longest,) if scope.quick else (64, longest):
                across: dict[str, Any] = {"query_length": rows, "key_length": length, "needs": ("cross_lengths",)}
                if not scope.capabilities.cross_lengths:
                    across = {"query_length": min(length, 256), "key_length": min(length, 256)}
                yield case(**{**one, **(far if note == FAR else {})}, note=note, **across)
        whole = {**one, "query_length": square, "key_length": square}
        yield case("causal", **whole, note=STATE, needs=NEEDS)
        if not scope.quick:
            yield case("causal", **whole, note=CANCELLING)


CHECKS = (Check(check_half_precision_accumulates_in_float32, "dtypes", _sums, asks_more=True),)
