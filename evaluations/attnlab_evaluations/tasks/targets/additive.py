"""The goals of additive attention: beside keras, whose layer is what users have today, and against its own growth. Needs torch.

keras' `AdditiveAttention` has no heads: it gets them as its batch. It projects nothing, which attnlab's time includes.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attnlab
from attnlab_evaluations.measure.memory import peak_extra_bytes
from attnlab_evaluations.measure.timing import Interval, paired_ratio
from attnlab_evaluations.tasks.targets.goals import NO_TIME, UNMEASURED, Target, random_inputs, time_pair

HEADS, WIDTH, LENGTH, LONG = 8, 64, 1024, 8192
MIB = 1 << 20
LONG_BUDGET = 600.0
"""Seconds of `--budget` from which on the long input is measured: it takes a minute or two."""
LEAST_BUDGET = 20.0
"""Seconds for all of these rows, below which none is begun: keras' layer takes several a call."""
Measured = tuple[Interval, str]


def additive_goals(budget: float, whole: float, seed: int, say: Callable[[str], None]) -> list[Target]:
    """Every row, within about `budget` seconds; the long ones where `whole`, the budget of the run, allows them."""
    variant = attnlab.create("additive", num_heads=HEADS, head_dim=WIDTH)
    theirs = _keras()
    keras, long = "keras", f"L={LONG}"
    enough = f"takes a minute or two; give --budget {LONG_BUDGET:g} or more"
    once: dict[str, float] = {}
    rows: list[tuple[str, str, str, float, Callable[[], Measured]]] = []
    for backward, goal, part in ((False, 1 / 25, 0.3), (True, 1 / 20, 0.7)):
        rows.append(
            (
                f"additive{_also(backward)}, L={LENGTH}",
                keras,
                "x",
                goal,
                partial(_beside, variant, theirs, backward, budget * part, seed),
            )
        )
    rows.append((f"additive, extra memory, L={LENGTH}", keras, "x", 0.05, partial(_memory_beside, variant, theirs)))
    for backward in (False, True):
        what = f"additive, extra memory{_also(backward)}, {2 * LENGTH} over {LENGTH}"
        rows.append((what, "itself", "x", 2.2, partial(_growth, variant, backward)))
    for what, unit, goal in (("extra memory, ", "MiB", 256.0), ("", "s", 180.0)):
        rows.append(
            (f"additive, {what}forward + backward, {long}", "-", unit, goal, partial(_long, variant, unit, once))
        )
    results = []
    for what, peer, unit, goal, measured in rows:
        say(what)
        if peer == keras and isinstance(theirs, str):
            results.append(Target(what, peer, UNMEASURED, unit, goal, theirs))
        elif budget < LEAST_BUDGET:
            results.append(Target(what, peer, UNMEASURED, unit, goal, NO_TIME))
        elif long in what and whole < LONG_BUDGET:
            results.append(Target(what, peer, UNMEASURED, unit, goal, enough))
        else:
            interval, note = measured()
            results.append(Target(what, peer, interval, unit, goal, note))
            gc.collect()
    return results


def _beside(variant: Any, theirs: Any, backward: bool, budget: float, seed: int) -> Measured:
    ours, other = _call(variant, LENGTH, backward), _keras_call(theirs, LENGTH, backward)
    pair = time_pair(ours, other, budget, seed)
    if pair is None:
        return UNMEASURED, NO_TIME
    note = f"{statistics.median(pair[0]) * 1e3:.3g} against {statistics.median(pair[1]) * 1e3:.4g} ms"
    return paired_ratio(*pair), note


def _memory_beside(variant: Any, theirs: Any) -> Measured:
    return _over(_call(variant, LENGTH, False), _keras_call(theirs, LENGTH, False))


def _growth(variant: Any, backward: bool) -> Measured:
    return _over(_call(variant, 2 * LENGTH, backward), _call(variant, LENGTH, backward))


def _over(one: Callable[[], object], other: Callable[[], object]) -> Measured:
    """Extra memory of one call over that of another; counted, so that it is the same each time."""
    first, second = peak_extra_bytes(one), peak_extra_bytes(other)
    return Interval(*[first / second] * 3), f"{first / MIB:.0f} against {second / MIB:.0f} MiB"


def _long(variant: Any, unit: str, once: dict[str, float]) -> Measured:
    """Extra memory and seconds of one call, both from the same."""
    if not once:
        call = _call(variant, LONG, True)
        began = time.perf_counter()
        once["MiB"] = peak_extra_bytes(call) / MIB
        once["s"] = time.perf_counter() - began
    return Interval(*[once[unit]] * 3), "one call"


def _also(backward: bool) -> str:
    return ", forward + backward" if backward else ""


def _call(variant: Any, length: int, backward: bool) -> Callable[[], object]:
    return _timed(lambda q, k, v: variant(q, k, v).out, random_inputs(HEADS, length, WIDTH), backward)


def _keras_call(layer: Any, length: int, backward: bool) -> Callable[[], object]:
    query, key, value = (x[0] for x in random_inputs(HEADS, length, WIDTH))
    return _timed(lambda q, k, v: layer([q, v, k]), (query, key, value), backward)


def _timed(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...], backward: bool
) -> Callable[[], object]:
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return run(*inputs)

        return forward
    leaves = tuple(x.requires_grad_() for x in inputs)

    def both() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(run(*leaves).sum(), leaves)

    return both


def _keras() -> Any:
    """keras' layer on torch, or why there is none."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    try:
        import keras
    except ImportError:
        return "keras is not installed: pip install keras"
    if keras.backend.backend() != "torch":
        return f"keras runs on {keras.backend.backend()}; set KERAS_BACKEND=torch"
    layer = keras.layers.AdditiveAttention()
    layer.build([(HEADS, LENGTH, WIDTH)] * 3)
    return layer
