"""What cannot be done, known before it is tried: inputs before they are built, calls before they are made.

An allocation that is too large does not always raise: Linux grants it and ends the process when it is
filled. So nothing is allocated to find out; before there are inputs, sizes come from the problem's outline.
Needs torch through its inputs only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnlab_evaluations.frame.records import OVER
from attnlab_evaluations.measure.claims import original
from attnlab_evaluations.measure.estimates import Estimates
from attnlab_evaluations.tasks.compare.problems import Calls, Problem, sketch
from attnlab_evaluations.tasks.compare.rows import PHASES


@dataclass(frozen=True)
class Ruled:
    """Why nothing of one variant is tried: a status word, its reason, and the seconds a call would take."""

    status: str
    detail: str
    expected: float = 0.0


def ruled_out(
    problem: Problem, names: Sequence[str], estimates: Estimates, *, seed: int, left: float
) -> dict[str, Ruled] | None:
    """Each variant's reason where building the inputs would serve none of `names`; None where it may serve one.

    `left` is the run's remaining seconds. Without an outline nothing is ruled out.
    """
    if problem.outline is None:
        return None
    outline = problem.outline()
    results: dict[str, Ruled] = {}
    able: dict[str, Calls] = {}
    for name in names:
        made = sketch(name, outline, seed=seed, random_gates=problem.random_gates, device=estimates.device)
        if made.refusal is None:
            able[name] = made
        else:
            results[name] = Ruled("unsupported", made.refusal)
    held = sum(part.nbytes for part in outline) + sum(calls.own_bytes for calls in able.values())
    for place in dict.fromkeys(("cpu", estimates.device)):  # inputs are drawn in the host's memory first
        lack = estimates.lacking(held, "the inputs alone need", place)
        if lack is not None:
            status, detail = lack
            detail += "" if place == estimates.device else " in the host's own memory"
            return {**results, **{name: Ruled(status, detail) for name in able}}
    for name, calls in able.items():
        reason = _forward_ruled_out(problem, name, calls, estimates, held=held, left=left)
        if reason is None:
            return None
        results[name] = reason
    return results


def _forward_ruled_out(
    problem: Problem, name: str, calls: Calls, estimates: Estimates, *, held: int, left: float
) -> Ruled | None:
    """Why not even one forward of `name` can run beside inputs of `held` bytes within `left` seconds, or None."""
    lack = estimates.refusal(problem, PHASES[0], name, calls, beside=held)
    if lack is not None:
        return Ruled(*lack)
    seconds = estimates.seconds(problem, PHASES[0], name, calls)
    if left <= 0:
        return Ruled(OVER, "no time left", seconds)
    return Ruled(OVER, f"~{seconds:.2g} s", seconds) if seconds > left else None


def refusals(
    problem: Problem, phase: str, able: Mapping[str, Calls], names: Iterable[str], estimates: Estimates
) -> dict[str, tuple[str, str]]:
    """Those of `names`, first come first served, that cannot be timed side by side: `(status, detail)` by name.

    In the backward each variant keeps copies of the inputs for as long as all are timed, so those add up: one
    is let in where the copies of all, and the most that any single call takes beyond its own, are free. A
    null control goes the way of its variant.
    """
    refused: dict[str, tuple[str, str]] = {}
    copies = most = 0.0
    for name in dict.fromkeys(names):
        source = original(name)
        calls = able[source]
        kept = calls.leaf_bytes if phase != PHASES[0] else 0
        beyond = estimates.extra_bytes(problem, phase, source, calls) - kept
        beside = copies + max(0.0, most - beyond) if kept else 0.0
        reason = refused.get(source) or estimates.refusal(problem, phase, source, calls, beside=beside)
        if reason is not None:
            refused[name] = reason
        else:
            copies, most = copies + kept, max(most, beyond)
    return refused
