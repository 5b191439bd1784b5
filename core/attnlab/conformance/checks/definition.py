"""Generated requests against the float64 definition: out and every gradient; of random variants the mean over seeds. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare import diagnosis
from attnlab.conformance.compare.comparer import DEFINITION, Comparer
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.bounds import defined_and_bound, measured, measured_gradients
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import Gradients, defined_answer, direction_for, gradients
from attnlab.conformance.oracle.draws import gives_up_exact_silently, is_random, require_exact
from attnlab.conformance.oracle.features import CONTENTS
from attnlab.conformance.oracle.inputs import Inputs, define, draw, reduction_terms, rows_of
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.oracle.space import FAR, UNEVEN
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.errors import InvalidInput

DRAWS = 250
"""Enough to find a mean that is 5% too large, in less than a tenth of a second."""
SIGMAS = 6.0
"""A correct variant misses a 6 sigma bound twice in 10^9 draws, and the draws are seeded."""
MEANS = ((), ("causal",), ("mask",), ("key_mask_left",), ("bias",), ("scale",), ("gqa",), ("window",))
"""Features with which a mean is compared."""
MEAN_ADVICE = (
    "A random variant's definition is its mean. Where another is meant, let the definition draw the same numbers from "
    "torch's default generator and claim `exact`"
)


GIVE_A_REASON = (
    "It does not claim `exact`. Where it approximates its formula by design, state how far it may be from it as a factor of the largest "
    "value, `capabilities = replace(..., exact=False, approximation=0.1)`, or why no bound holds, `notes={'exact': 'its features are few'}`"
)
KINKS = frozenset({"zero_queries", "zero_keys", "tiny"})
"""Contents at which a norm or a relu has no derivative, or a huge one."""


def check_agrees_with_definition(variant: Any, case: Case) -> None:
    """Out equals the float64 definition within the derived bound; a random variant's does so in the mean."""
    draws, rows = _draws(variant, case), compared_rows(variant, case)
    inputs = draws[0]
    if not variant.capabilities.exact and is_random(variant, inputs):
        _demand_right_mean(Comparer(variant, inputs))
        return
    if variant.capabilities.approximation is not None:
        _demand_near(Comparer(variant, inputs), rows)
        return
    if gives_up_exact_silently(variant) and not case.features:
        exact, limit = defined_and_bound(variant, inputs, rows=rows)
        got = inputs.out(variant) if rows is None else rows_of(inputs.out(variant), rows)
        Comparer(variant, inputs).close(got, exact, limit, DEFINITION, GIVE_A_REASON, inputs=inputs, rows=rows)
        return
    require_exact(variant, inputs)
    exact, limit = exact_of_draws(variant, draws, rows)
    with far_positions_may_end(variant, case):
        got = inputs.out(variant)
    got = got if rows is None else rows_of(got, rows)

    def told() -> str:
        return diagnosis.advice(variant, inputs, got, exact, limit, rows)

    Comparer(variant, inputs).close(got, exact, limit, DEFINITION, told, inputs=inputs, rows=rows)


def check_gradients_match_definition(variant: Any, case: Case) -> None:
    """Gradients of query, key, value, bias, sinks, gates and parameters equal the definition's, and so does the out they go with."""
    draws, rows = _draws(variant, case, gradients=True), compared_rows(variant, case)
    inputs = draws[0]
    require_exact(variant, inputs)
    direction = direction_for(inputs, rows)
    with far_positions_may_end(variant, case):
        out, grads = gradients(variant, inputs, direction)
    compare = Comparer(variant, inputs)
    (exact, limit), exact_gradients = answers_of_draws(variant, draws, direction, rows)
    versus = f"{DEFINITION} (while gradients are recorded)"
    out = out if rows is None else rows_of(out, rows)

    def told() -> str:
        path = "The path that autograd records must compute what the other path computes"
        return diagnosis.cause(variant, inputs, out, exact, limit, rows) or path

    compare.close(out, exact, limit, versus, told, rows=rows)
    advice = "Its own backward must use the forward's masks, scale and order; sum broadcast axes back to their shape"
    compare.close_gradients(grads, exact_gradients, advice)


def _demand_near(compare: Comparer, rows: Sequence[int] | None) -> None:
    """Fail unless out is as near to the definition's as the variant says of itself."""
    variant, inputs, factor = compare.variant, compare.inputs, compare.variant.capabilities.approximation
    exact, limit = defined_and_bound(variant, inputs, rows=rows)
    got = inputs.out(variant)
    size = largest(inputs.value)
    stated = Bound(
        factor * size + limit.limit, f"approximation={factor} of the largest value, {size:.3g}, and rounding"
    )
    advice = "State the largest error as `approximation`, or look for what drops a mask, a scale or a normaliser"
    compare.close(
        got if rows is None else rows_of(got, rows), exact, stated, DEFINITION, advice, inputs=inputs, rows=rows
    )


def _demand_right_mean(compare: Comparer) -> None:
    """Fail unless the mean of out over seeds is the definition's, element by element and along the definition's answer."""
    variant, case, inputs = compare.variant, compare.case, compare.inputs
    if case.features not in MEANS or case.query_length > 16:
        raise NotApplicable("it is random by design: its mean is judged on a few small cases")
    with torch.no_grad(), seeded_draws(case.seed + 100, case.device):  # one seed: further calls draw further numbers
        exact = define(variant, inputs)["out"]
        draws = [variant(inputs.query, inputs.key, inputs.value, **inputs.arguments).out for _ in range(DRAWS)]
    outs = torch.stack(draws).to(torch.float64)
    # The mean of n draws of spread s misses by 6 s / sqrt(n) at most. A key that is rarely drawn may show no spread in n
    # draws, so each element is allowed the largest spread that any has.
    size = max(largest(exact), largest(inputs.value))
    rounding = rounding_bound(case.dtype, terms=reduction_terms(case), magnitude=size).limit
    along = (outs * exact).sum(dim=(1, 2, 3, 4))  # [draws]
    size_along, mean_along = exact.square().sum().reshape(1), along.mean().reshape(1)
    for what, mean, expected, spread, more in (
        ("the mean of out", outs.mean(dim=0), exact, float(outs.std(dim=0).max()), 1.0),
        (
            "<the mean of out, the definition's out>",
            *(mean_along, size_along, float(along.std()), float(exact.abs().sum())),
        ),
    ):
        limit = Bound(
            SIGMAS * spread / DRAWS**0.5 + rounding * more, f"{SIGMAS:.0f} sigma of the mean of {DRAWS} draws"
        )
        compare.close(mean, expected, limit, "the float64 definition's", MEAN_ADVICE, what=what)


@contextmanager
def far_positions_may_end(variant: Any, case: Case) -> Iterator[None]:
    """`NotApplicable` where a variant whose positions end refuses an offset past them: no request tells of it beforehand."""
    try:
        yield
    except InvalidInput as refusal:
        numbers = [x for x in variant.options.values() if isinstance(x, int) and not isinstance(x, bool)]
        if set(FAR) & set(case.features) and any(0 < x <= 99 for x in numbers):
            raise NotApplicable(f"it refuses this offset: {refusal}") from None
        raise


def compared_rows(variant: Any, case: Case) -> list[int] | None:
    """The query rows to compare; all where a row depends on other queries."""
    return case.rows if variant.capabilities.rows_independent else None


def _draws(variant: Any, case: Case, gradients: bool = False) -> list[Inputs]:
    """The case's inputs, and for sums that are ill-conditioned three more.

    There one rounding of a score moves the output as much as all other roundings together. The error of one draw may be luckily
    small, and another correct order of the same sums may err by more than twice of it. Some contents are ill-conditioned whatever their
    numbers. Gradients through the normaliser of a feature map are so at some numbers, so almost the same ones are drawn.
    """
    first = draw(case, variant)
    if set(CONTENTS) & set(case.features):
        others = [draw(replace(case, seed=case.seed + n), variant).tensors() for n in (31, 32, 33)]
        return [first, *(first.rebuilt(one) for one in others)]
    if not gradients or getattr(variant, "family", "") != "feature_map":
        return [first]
    chance = torch.Generator().manual_seed(case.seed + 31)

    def moved(x: Tensor) -> Tensor:
        return x * (1 + 2**-7 * torch.randn(x.shape, generator=chance, dtype=torch.float64)).to(x)

    return [first, *(first.changed(moved) for _ in range(3))]


def exact_of_draws(
    variant: Any, draws: Sequence[Inputs], rows: Sequence[int] | None, what: str = "out", visible: Tensor | None = None
) -> tuple[Tensor, Bound]:
    """The definition's `what` of the first draw, and a bound by the plain formula's largest error over all."""

    def answer(dtype: torch.dtype) -> Tensor:
        return torch.stack([define(variant, one, dtype=dtype, visible=visible, rows=rows)[what] for one in draws])

    size = max(largest(one.value) for one in draws) if what == "out" else 1.0
    exact, limit = measured(draws[0].case, answer, size)
    if not bool(exact[0].isfinite().all()) and what == "out":
        raise NotApplicable("its formula has no value there")
    return exact[0], limit


def answers_of_draws(
    variant: Any, draws: Sequence[Inputs], direction: Tensor, rows: Sequence[int] | None, visible: Tensor | None = None
) -> tuple[tuple[Tensor, Bound], dict[str, tuple[Tensor, Bound]]]:
    """The same for out, and for the gradients of sum(out * direction) by name."""
    outs: dict[torch.dtype, Tensor] = {}

    def answer(dtype: torch.dtype) -> Gradients:
        each = [defined_answer(variant, one, direction, dtype, visible, rows) for one in draws]
        outs[dtype] = torch.stack([out for out, _ in each])
        return {name: torch.stack([grads[name] for _, grads in each]) for name in each[0][1]}

    case, size = draws[0].case, max(largest(one.value) for one in draws)
    grads = measured_gradients(case, answer, largest(direction) * size)
    exact, limit = measured(case, outs.__getitem__, size)
    defined = {n: (g[0], bound) for n, (g, bound) in grads.items() if bool(g[0].isfinite().all())}
    if not defined:
        raise NotApplicable("its formula has no derivative there")
    return (exact[0], limit), defined


def _requests(scope: Scope) -> Iterable[Case]:
    yield from scope.requests(quick=36)
    yield from scope.cases(*(name for name in scope.space.axes.get("contents", ()) if name))
    yield from scope.cases(*("+".join(labels) for labels in MEANS))
    if not scope.quick:
        yield from _long(scope)
    yield from (case(dtype=dtype) for dtype in scope.dtypes)


def _long(scope: Scope) -> Iterable[Case]:
    """Past usual tiles, and past lengths at which another path may be taken, with little else."""
    if scope.stepwise:
        return
    contents = [name for name in scope.space.axes.get("contents", ()) if name]
    yield from scope.cases(*contents, "causal", batch=1, query_length=300, key_length=300)
    yield from (case("causal", batch=1, query_length=577, key_length=577, dtype=d) for d in scope.other_dtypes)
    padded = ("causal+key_mask_holes", "causal+segments", "causal+query_lengths+key_lengths")
    yield from scope.usable(*padded, batch=1, query_length=600, key_length=600)
    sloping = [name for name in contents if name in ("rising_scores", "falling_scores")]
    yield from scope.cases("", "causal", *sloping, **ONE, query_length=1100, key_length=1100)
    yield from scope.cases("", *sloping, **ONE, query_length=3, key_length=4200)
    yield from scope.cases(*sloping[:1], **ONE, query_length=2300, key_length=2300)


ONE: dict[str, Any] = {"batch": 1, "num_heads": 1, "num_kv_heads": 1}
"""One item and head."""


def _recorded(scope: Scope) -> Iterable[Case]:
    """No contents at kinks, and none whose gradients are all cancellation."""
    if not scope.quick and not scope.stepwise:
        more = {**ONE, "needs": ("backward",)}
        yield from scope.cases("", "causal", **more, query_length=3, key_length=1100)
        yield from scope.usable("causal+window=(100,0)", "window=(40,40)", **more, query_length=300, key_length=300)
    for one in scope.requests("backward", full=400, seed=1000):
        if one.dtype == "float16" and "large_values" in one.features:  # where gradients overflow
            continue
        if not (KINKS | UNEVEN | {"large_queries"}) & set(one.features):
            yield one


CHECKS = (
    Check(check_agrees_with_definition, "values", _requests, random_too=True),
    Check(check_gradients_match_definition, "gradients", _recorded),
)
