"""Dropout: seeded, unbiased, on the weights, a number drawn for each pair, the same mask backward. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._averages import require_average, require_linear
from attnlab.conformance.checks._stepping import NEEDS, feed, step
from attnlab.conformance.checks.gradients import demand_slopes
from attnlab.conformance.compare.comparer import Comparer, drawn
from attnlab.conformance.compare.tolerances import largest
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, define, draw
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, NotApplicable, Scope

ADVICE_STATE = "A step drops like any other call: past and new keys alike"
SIGMAS = 6.0
"""A correct variant misses a 6 sigma bound twice in 10^9 draws, and the draws are seeded."""
SIGMAS_OF_MASKS = 7.0
"""Of a sum of n signs; 10^6 of them are compared, and one in 4 * 10^11 lies beyond."""
FEWEST = 50
"""Signs in a sum below which even a full repetition stays within 7 sigma."""
SEED = 5


def check_dropout_rate(variant: Any, case: Case) -> None:
    """A share p of the weights is dropped; the others are divided by 1 - p."""
    plain = draw(case, variant)
    compare, weights = _identity_values(variant, plain)
    inputs = compare.inputs
    alike = inputs.with_tensors(value=plain.value[..., :1].expand(inputs.value.shape).clone())
    columns = _seeded(variant, alike, 1, dropout_p=0.5)
    versus = "its first column, where all columns of value are one (dropout_p = 0.5)"
    advice = "Dropout acts on weights, so that all of a value is dropped or none of it: not on out"
    compare.same(columns, columns[..., :1].expand(columns.shape), versus, advice, magnitude=2 * largest(alike.value))
    for p in (0.1, 0.5, 0.9):
        dropped = _seeded(variant, inputs, 1, dropout_p=p).to(torch.float64)  # the weights after dropout
        advice = "Dropout acts on the normalised weights and divides the kept ones by 1 - p"
        counted, kept = _demand_kept_weights(compare, dropped, weights, p, f"p = {p}", advice)
        if not bool(counted.any()):
            raise NotApplicable("its formula gives no weight here that could be dropped")
        _demand_share(compare, counted, kept, p, "weights", "Drop each weight with probability p, independently")


def _demand_kept_weights(
    compare: Comparer, dropped: Tensor, weights: Tensor, p: float, words: str, advice: str
) -> tuple[Tensor, Tensor]:
    """Fail unless each weight is 0 or weight / (1 - p) after dropout; which weights count, and which of those were kept."""
    counted = weights > 1e-3
    kept = (dropped != 0) & counted
    expected = torch.where(kept, weights / (1 - p), torch.where(counted, 0.0, dropped))
    versus = f"weight / (1 - p) where kept, 0 where dropped ({words})"
    compare.same(dropped, expected, versus, advice, "weights after dropout", magnitude=1 / (1 - p))
    return counted, kept


def _demand_share(compare: Comparer, counted: Tensor, kept: Tensor, p: float, what: str, advice: str) -> None:
    n = int(counted.sum())
    if not n:  # a window of the formula's own may hide all of them
        return
    share = 1 - int(kept.sum()) / n
    bound = SIGMAS * (p * (1 - p) / n) ** 0.5
    compare.demand(
        abs(share - p) <= bound,
        f"dropout_p = {p} dropped a share of {share:.4f} of {n} {what}, bound {p} +- {bound:.4f} "
        f"({SIGMAS:.0f} sigma of a binomial)",
        advice,
    )


def check_dropout_is_seeded(variant: Any, case: Case) -> None:
    """The same seed gives the same bits, another seed others, and p = 0 is no dropout at all."""
    inputs, compare = drawn(case, variant)
    first, again, other = (_seeded(variant, inputs, seed, dropout_p=0.5) for seed in (1, 1, 2))
    compare.demand(
        bool(torch.equal(first, again)),
        "the same seed gives two outputs with dropout_p = 0.5",
        "Draw from torch's default generator of the device only",
    )
    compare.demand(
        not bool(torch.equal(first, other)),
        "two seeds give one output with dropout_p = 0.5",
        "dropout_p is ignored, or the mask is fixed",
    )
    for recording in (False, variant.capabilities.backward):
        call = inputs.with_tensors(query=inputs.query.clone().requires_grad_(recording))
        with torch.set_grad_enabled(recording), seeded_draws(1, case.device):
            pair = [variant(*call.main, **call.arguments, dropout_p=0.5).out for _ in range(2)]
        compare.demand(
            not bool(torch.equal(*pair)),
            f"two calls in a row give one output with dropout_p = 0.5{' while autograd records' if recording else ''}",
            "Draw anew in each call: keep no mask and no generator of your own",
        )
    plain, none = inputs.out(variant), inputs.out(variant, dropout_p=0.0)
    compare.demand(bool(torch.equal(plain, none)), "dropout_p = 0 changes the output", "0 means no dropout")


def check_dropout_backward_uses_the_forward_mask(variant: Any, case: Case) -> None:
    """Out is linear in value for one mask, so <grad_value, value> must equal <grad_out, out>."""
    inputs, compare = drawn(case, variant)
    require_linear(variant, inputs)
    direction = direction_for(inputs)
    with seeded_draws(3, case.device):
        out, grads = gradients(variant, inputs, direction, dropout_p=0.4)
    left = (grads["value"].to(torch.float64) * inputs.value).sum().reshape(1)
    right = (direction.to(torch.float64) * out).sum().reshape(1)
    compare.same(
        left,
        right,
        "<grad_out, out>, which it equals when both use one mask",
        "A backward that recomputes must restore the generator's state of the forward",
        "<gradient of value, value>",
        magnitude=largest(direction) * largest(inputs.value) * out.numel(),
    )


def check_dropout_rate_with_a_state(variant: Any, case: Case) -> None:
    """With a state a share p of the weights is dropped too, of past keys and of new ones, and the others are divided by 1 - p."""
    compare, weights = _identity_values(variant, draw(case, variant))
    inputs, past, p = compare.inputs, case.key_length // 2, 0.5
    with torch.no_grad(), seeded_draws(1, case.device):
        _, state = feed(variant, inputs, [past])
        dropped = step(variant, inputs, past, case.query_length, state, dropout_p=p).out.double()
    words = f"p = {p}, after {past} tokens"
    counted, kept = _demand_kept_weights(compare, dropped, weights[:, :, past:], p, words, ADVICE_STATE)
    for word, columns in (("past", slice(0, past)), ("new", slice(past, None))):
        what = f"weights of {word} keys"
        _demand_share(compare, counted[..., columns], kept[..., columns], p, what, ADVICE_STATE)


def check_dropout_masks_are_independent(variant: Any, case: Case) -> None:
    """No item, head, row, column or tile repeats the mask of another, wherever it lies."""
    inputs, compare = drawn(case, variant)
    require_linear(variant, inputs)
    require_average(variant, inputs)
    with torch.no_grad():
        weights, dropped = (_read_off(variant, inputs, p) for p in (0.0, 0.5))
    counted = weights > 1e-9
    signs = torch.where(counted, torch.where(dropped != 0, 1.0, -1.0), 0.0).flatten(0, 1)  # [B H, Lq, Lk]
    counts = counted.double().flatten(0, 1)
    for first, second in ((a, b) for a in range(signs.shape[0]) for b in range(a, signs.shape[0])):
        alike = _correlated(signs[first], signs[second])
        number = _correlated(counts[first], counts[second])
        if first == second:
            alike[0, 0] = 0.0  # a mask equals itself
        excess = torch.where(number >= FEWEST, alike.abs() - SIGMAS_OF_MASKS * number.sqrt(), -1.0)
        worst = int(excess.argmax())
        if float(excess.flatten()[worst]) <= 0:
            continue
        shifts = zip(divmod(worst, excess.shape[1]), excess.shape, strict=True)
        rows, columns = (n if n < size // 2 else n - size for n, size in shifts)
        (item, head), (other_item, other_head) = (divmod(n, case.num_heads) for n in (first, second))
        places = int(number.flatten()[worst])
        share = float(0.5 + 0.5 * alike.flatten()[worst] / number.flatten()[worst])
        compare.fail(
            f"the dropout mask of item {item}, head {head} and that of item {other_item}, head {other_head}, moved by "
            f"{rows} rows and {columns} columns, agree in {share:.0%} of {places} places (chance gives half, "
            f"{SIGMAS_OF_MASKS:.0f} sigma are exceeded)",
            "Draw a mask of the full shape [B, Hq, Lq, Lk]; tiles, heads and items that share a seed share a mask",
        )


def check_dropout_gradients_match_finite_differences(variant: Any, case: Case) -> None:
    """With one seed the slope along random directions is the one that the gradients predict."""
    inputs, compare = drawn(case, variant)
    direction = direction_for(inputs)

    def value_at(call: Inputs) -> Tensor:
        return (_seeded(variant, call, SEED, dropout_p=0.4) * direction).sum()

    with seeded_draws(SEED, case.device):
        out, grads = gradients(variant, inputs, direction, dropout_p=0.4)
    if largest((out * direction).sum() - value_at(inputs)) > 1e-9 * largest(out) * out.numel():
        raise NotApplicable("with gradients on it draws other numbers, so no slope can be measured")
    demand_slopes(compare, grads, value_at, "the gradient under dropout")


def check_dropout_leaves_weights_and_lse_alone(variant: Any, case: Case) -> None:
    """Weights are returned before dropout, and the normaliser sums every visible key, dropped or not."""
    inputs, compare = drawn(case, variant)
    features = {f"need_{what}": True for what in ("weights", "lse") if getattr(variant.capabilities, what)}
    if not features:
        raise NotApplicable("it declares neither weights nor lse")
    with seeded_draws(SEED, case.device):
        plain = inputs.answer(variant, **features)
        dropped = inputs.answer(variant, dropout_p=0.5, **features)
    compare.demand(
        not inputs.visible().any() or not torch.equal(dropped.out, plain.out),
        f"dropout_p = 0.5 changes nothing where {' and '.join(features)} is asked for too",
        "The path that returns weights or lse drops like the other one",
    )
    for what, expected in (("weights", plain.weights), ("lse", plain.lse)):
        if expected is not None:
            advice = "Normalise first, then drop: sum the normaliser from what was not dropped yet"
            got = getattr(dropped, what)
            compare.same(got, expected, "the same call without dropout", advice, what, magnitude=1.0)


def check_dropout_of_one_gives_zero(variant: Any, case: Case) -> None:
    """dropout_p=1: out is 0 and every gradient finite."""
    inputs, compare = drawn(case, variant)
    require_linear(variant, inputs)
    why, advice = "every weight is dropped", "1 / (1 - p) has no value at p = 1"
    if not variant.capabilities.backward:
        compare.zero(inputs.out(variant, dropout_p=1.0), "out", why, advice)
        return
    out, grads = gradients(variant, inputs, direction_for(inputs), dropout_p=1.0)
    compare.zero(out, "out", why, advice)
    for name, gradient in grads.items():
        compare.finite(gradient, f"gradient of {name}", why, advice)


def _read_off(variant: Any, inputs: Inputs, p: float) -> Tensor:
    """The weights after dropout `[B, Hq, Lq, Lk]`: out where values are unit vectors, as many at a time as are wide."""
    keys, width = inputs.key.shape[2], inputs.value.shape[3]
    eye = torch.eye(keys, dtype=inputs.value.dtype, device=inputs.value.device)
    parts = []
    for start in range(0, keys, width):
        part = eye[:, start : start + width]
        part = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        call = inputs.with_tensors(value=part.expand_as(inputs.value).clone())
        parts.append(_seeded(variant, call, SEED, **({"dropout_p": p} if p else {})))
    return torch.cat(parts, dim=-1)[..., :keys].double()


def _correlated(a: Tensor, b: Tensor) -> Tensor:
    """`sum_ij a[i, j] b[i + r, j + c]` for every shift (r, c), negative ones from the end; rounded, as terms are integers."""
    size = [2 * n for n in a.shape]
    product = torch.fft.rfft2(a, s=size).conj() * torch.fft.rfft2(b, s=size)
    counts: Tensor = torch.fft.irfft2(product, s=size).round()
    return counts


def _identity_values(variant: Any, plain: Inputs) -> tuple[Comparer, Tensor]:
    """The call with the unit vectors as values, so that out is the weights; and the definition's weights.

    `NotApplicable` where out is something else than weights times value, or not linear in value.
    """
    require_linear(variant, plain)
    case, value = plain.case, plain.value
    eye = torch.eye(case.key_length, case.value_dim, dtype=value.dtype, device=value.device)
    inputs = plain.with_tensors(value=eye.expand_as(value).clone())
    require_average(variant, inputs)
    with torch.no_grad():
        weights = define(variant, inputs)["out"]
    require_exact(variant, inputs)
    return Comparer(variant, inputs), weights


def _seeded(variant: Any, inputs: Inputs, seed: int, **more: Any) -> Tensor:
    with seeded_draws(seed, inputs.case.device):
        return inputs.out(variant, **more)


def _statistics(scope: Scope) -> Iterable[Case]:
    more: dict[str, Any] = {"needs": ("dropout",), "batch": 6, "num_heads": 4, "num_kv_heads": 4, "key_length": 8}
    square = {**more, "query_length": 8}
    for labels in ("", "causal"):
        yield from scope.cases(labels, **more, query_length=24)
        yield from scope.cases(labels, **square)
    yield from (case(dtype=d, **square) for d in scope.other_dtypes)
    yield from scope.usable("bias+scale", "softcap+sinks+key_mask_holes", "mask+score_mod", **square)
    if not scope.quick:
        yield from scope.usable("window+bias_per_key", **square)
        yield from scope.usable("segments+softcap", **{**square, "num_kv_heads": 2})


def _through_a_state(scope: Scope) -> Iterable[Case]:
    sizes = {"batch": 6, "query_length": 8, "key_length": 8, "num_heads": 4, "num_kv_heads": 4}
    return scope.cases("causal", needs=(*NEEDS, "dropout"), **sizes)


def _cases(*needs: str) -> Any:
    return lambda scope: scope.cases("", "causal", "mask", "gqa", needs=needs)


def _backward(scope: Scope) -> Iterable[Case]:
    needs = ("dropout", "backward")
    yield from _cases(*needs)(scope)
    yield from scope.cases("causal", needs=needs, query_length=70, key_length=70)


def _long(scope: Scope) -> Iterable[Case]:
    one: dict[str, Any] = {"needs": ("dropout",), "query_length": 70, "key_length": 70}
    yield from scope.usable("gqa", **one)
    if not scope.quick:
        yield from scope.usable("causal+key_mask_left", **one)
        # Values as wide as keys are many: one call reads all weights off.
        length, width = (300, 300) if scope.capabilities.value_dim else (140, 8)
        one |= {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "query_length": length, "key_length": length}
        yield from scope.cases("", **one, value_dim=width)


def _slopes(scope: Scope) -> Iterable[Case]:
    sizes: dict[str, Any] = {"needs": ("dropout", "backward"), "dtype": "float64", "batch": 1}
    yield from scope.usable("", "causal", "gqa+mask", "bias+softcap+sinks", **sizes, query_length=5, key_length=5)
    yield from scope.usable("causal", **sizes, query_length=70, key_length=70)


def _few(scope: Scope) -> Iterable[Case]:
    needs = ("dropout",)
    yield from scope.usable("", "mask+gqa", "causal+sinks", needs=needs)
    yield from scope.usable("causal", needs=needs, query_length=70, key_length=70)


_MIXED = ("projects_values",)
CHECKS = (
    Check(check_dropout_rate, "dropout", _statistics, unless=_MIXED),
    Check(check_dropout_rate_with_a_state, "dropout", _through_a_state, unless=_MIXED),
    Check(check_dropout_is_seeded, "dropout", _cases("dropout"), random_too=True),
    Check(check_dropout_backward_uses_the_forward_mask, "dropout", _backward, random_too=True),
    Check(check_dropout_masks_are_independent, "dropout", _long, unless=_MIXED),
    Check(
        check_dropout_gradients_match_finite_differences,
        "dropout",
        _slopes,
        unless=("surrogate_gradient",),
        random_too=True,
    ),
    Check(check_dropout_leaves_weights_and_lse_alone, "dropout", _few, asks_more=True),
    Check(check_dropout_of_one_gives_zero, "dropout", _few),
)
