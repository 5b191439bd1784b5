"""Dropout past one tile: each pair has a draw of its own, backward uses it, and only out feels it. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import require_average
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.checks.dropout import require_linear
from attnlab.conformance.checks.gradients import demand_slope, difference, directions
from attnlab.conformance.compare.messages import demand, demand_close, demand_finite, demand_zero
from attnlab.conformance.compare.tolerances import largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.draws import seeded_draws
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope

SIGMAS = 7.0
"""Of a sum of n signs; 10^6 of them are looked at, and one in 4 * 10^11 lies beyond."""
FEWEST = 50
"""Signs in a sum below which even a full repetition stays within 7 sigma."""
SEED = 5


def check_dropout_masks_are_independent(variant: Any, case: Case) -> None:
    """No item, head, row, column or tile repeats the mask of another, wherever it lies."""
    inputs = draw(case, variant)
    require_linear(variant, inputs)
    require_average(variant, inputs)
    with torch.no_grad():
        weights = _read_off(variant, inputs, 0.0)
        seen = _read_off(variant, inputs, 0.5)
    counted = weights > 1e-9
    signs = torch.where(counted, torch.where(seen != 0, 1.0, -1.0), 0.0).flatten(0, 1)  # [B H, Lq, Lk]
    counts = counted.double().flatten(0, 1)
    for first in range(signs.shape[0]):
        for second in range(first, signs.shape[0]):
            alike = _correlated(signs[first], signs[second])
            number = _correlated(counts[first], counts[second])
            if first == second:
                alike[0, 0] = 0.0  # a mask equals itself
            excess = torch.where(number >= FEWEST, alike.abs() - SIGMAS * number.sqrt(), -1.0)
            worst = int(excess.argmax())
            if float(excess.flatten()[worst]) <= 0:
                continue
            rows, columns = (
                _signed(n, size) for n, size in zip(divmod(worst, excess.shape[1]), excess.shape, strict=True)
            )
            pairs = [divmod(n, case.num_heads) for n in (first, second)]
            demand(
                False,
                variant,
                case,
                f"the dropout mask of item {pairs[0][0]}, head {pairs[0][1]} and that of item {pairs[1][0]}, head "
                f"{pairs[1][1]}, moved by {rows} rows and {columns} columns, agree in "
                f"{float(0.5 + 0.5 * alike.flatten()[worst] / number.flatten()[worst]):.0%} of "
                f"{int(number.flatten()[worst])} places (chance gives half, {SIGMAS:.0f} sigma are exceeded)",
                "Draw a mask of the full shape [B, Hq, Lq, Lk]; tiles, heads and items that share a seed share a mask",
            )


def check_dropout_gradients_match_finite_differences(variant: Any, case: Case) -> None:
    """With one seed the slope along random directions is the one that the gradients predict."""
    inputs = draw(case, variant)
    direction = direction_for(inputs)

    def value_at(tensors: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), seeded_draws(SEED, case.device):
            out: Tensor = inputs.rebuilt(tensors).run(variant, dropout_p=0.4).out
        return (out * direction).sum()

    with seeded_draws(SEED, case.device):
        out, found = gradients(variant, inputs, direction, dropout_p=0.4)
    base = inputs.tensors()
    if largest((out * direction).sum() - value_at(base)) > 1e-9 * largest(out) * out.numel():
        raise NotApplicable("with gradients on it draws other numbers, so no slope can be measured")
    for step in directions(base, case, 2):
        slope = sum(((found[n] * d).sum() for n, d in step.items()), start=torch.zeros((), dtype=torch.float64))
        demand_slope(variant, case, slope, difference(value_at, base, step), "the gradient under dropout")


def check_dropout_leaves_weights_and_lse_alone(variant: Any, case: Case) -> None:
    """Weights are returned before dropout, and the normaliser sums every visible key, dropped or not."""
    inputs = draw(case, variant)
    have = variant.capabilities
    asked = {f"need_{what}": True for what in ("weights", "lse") if getattr(have, what)}
    if not asked:
        raise NotApplicable("it declares neither weights nor lse")
    with torch.no_grad(), seeded_draws(SEED, case.device):
        plain = inputs.run(variant, **asked)
        dropped = inputs.run(variant, dropout_p=0.5, **asked)
    visible = inputs.visible().any()
    demand(
        not visible or not torch.equal(dropped.out, plain.out),
        variant,
        case,
        f"dropout_p = 0.5 changes nothing where {' and '.join(asked)} is asked for too",
        "The path that returns weights or lse drops like the other one",
    )
    for what in ("weights", "lse"):
        expected = getattr(plain, what)
        if expected is not None:
            demand_close(
                getattr(dropped, what),
                expected,
                rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=max(1.0, largest(expected))),
                variant,
                case,
                what=what,
                versus="the same call without dropout",
                advice="Normalise first, then drop: sum the normaliser from what was not dropped yet",
            )


def check_dropping_everything_gives_zero(variant: Any, case: Case) -> None:
    """dropout_p=1: out is 0 and every gradient finite."""
    inputs = draw(case, variant)
    require_linear(variant, inputs)
    told: dict[str, Any] = {"why": "every weight is dropped", "advice": "1 / (1 - p) has no value at p = 1"}
    if not variant.capabilities.backward:
        with torch.no_grad():
            demand_zero(inputs.run(variant, dropout_p=1.0).out, variant, case, what="out", **told)
        return
    out, found = gradients(variant, inputs, direction_for(inputs), dropout_p=1.0)
    demand_zero(out, variant, case, what="out", **told)
    for name, gradient in found.items():
        demand_finite(gradient, variant, case, what=f"gradient of {name}", **told)


def _read_off(variant: Any, inputs: Inputs, p: float) -> Tensor:
    """The weights after dropout `[B, Hq, Lq, Lk]`: out where values are unit vectors, as many at a time as are wide."""
    keys, width = inputs.key.shape[2], inputs.value.shape[3]
    eye = torch.eye(keys, dtype=inputs.value.dtype, device=inputs.value.device)
    parts = []
    for start in range(0, keys, width):
        part = eye[:, start : start + width]
        part = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        with seeded_draws(SEED, inputs.case.device):
            shown = inputs.with_tensors(value=part.expand_as(inputs.value).clone())
            parts.append(shown.run(variant, **({"dropout_p": p} if p else {})).out)
    return torch.cat(parts, dim=-1)[..., :keys].double()


def _correlated(a: Tensor, b: Tensor) -> Tensor:
    """`sum_ij a[i, j] b[i + r, j + c]` for every shift (r, c), negative ones from the end; rounded, as terms are integers."""
    size = [2 * n for n in a.shape]
    product = torch.fft.rfft2(a, s=size).conj() * torch.fft.rfft2(b, s=size)
    counts: Tensor = torch.fft.irfft2(product, s=size).round()
    return counts


def _signed(shift: int, size: int) -> int:
    return shift if shift < size // 2 else shift - size


def _long(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"needs": ("dropout",), "dtype": scope.base, "query_length": 70, "key_length": 70}
    yield case(*declared(scope, "gqa"), **sizes)
    if not scope.quick:
        yield case(*declared(scope, "causal", "key_mask_left"), **sizes)
        one = {**sizes, "batch": 1, "num_heads": 1, "num_kv_heads": 1}
        length, width = (
            (300, 300) if scope.capabilities.value_dim else (140, 8)
        )  # values as wide: one call reads all off
        yield case(**{**one, "query_length": length, "key_length": length}, value_dim=width)


def _slopes(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"needs": ("dropout", "backward"), "dtype": "float64", "batch": 1}
    for labels in ((), ("causal",), ("gqa", "mask"), ("bias", "softcap", "sinks")):
        yield case(*declared(scope, *labels), **sizes, query_length=5, key_length=5)
    yield case(*declared(scope, "causal"), **sizes, query_length=70, key_length=70)


def _few(*needs: str) -> Any:
    def make(scope: Scope) -> Iterable[Case]:
        for labels in ((), ("mask", "gqa"), ("causal", "sinks")):
            yield case(*declared(scope, *labels), needs=needs, dtype=scope.base)
        yield case(*declared(scope, "causal"), needs=needs, dtype=scope.base, query_length=70, key_length=70)

    return make


CHECKS = (
    Check(check_dropout_masks_are_independent, "dropout", _long),
    Check(check_dropout_gradients_match_finite_differences, "dropout", _slopes, random_too=True),
    Check(check_dropout_leaves_weights_and_lse_alone, "dropout", _few("dropout"), asks_more=True),
    Check(check_dropping_everything_gives_zero, "dropout", _few("dropout")),
)
