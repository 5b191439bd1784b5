"""The table of a dates run and its goals, from cells. Needs tabulate, no torch.

Every seed's value is shown, never the best alone; a cell without a number holds its status word.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.dates.settings import DEFAULT, NONE, DatesSettings
from attnlab_evaluations.tasks.dates.task import TEST_FILLER, TRAINING_FILLER

AT_LEAST = dict.fromkeys(DEFAULT, 0.95)
AT_MOST = {NONE: 0.30}
NOT_APPLICABLE = "n/a"


def goals(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each variant of the run that has a goal: variant, goal in words, exact by seed, reached.

    It is reached where every seed's training is ok and its value meets the goal.
    """
    results = []
    for name in (*AT_LEAST, *AT_MOST):
        mine = [cell for cell in cells if cell["variant"] == name]
        if not mine:
            continue
        values = [cell["value"]["exact"] if cell["status"] == "ok" else None for cell in mine]
        least, most = AT_LEAST.get(name, 0.0), AT_MOST.get(name, 1.0)
        words = f"at least {_percent(least)}" if name in AT_LEAST else f"at most {_percent(most)}"
        reached = all(value is not None and least <= value <= most for value in values)
        results.append({"variant": name, "goal": words, "exact": values, "reached": reached})
    return results


def sentence(goal: dict[str, Any]) -> str:
    """`goal: additive at least 95 %: reached (100.0, 99.8, 100.0)`."""
    values = ", ".join(NOT_APPLICABLE if v is None else f"{100 * v:.1f}" for v in goal["exact"])
    return f"goal: {goal['variant']} {goal['goal']}: {'reached' if goal['reached'] else 'missed'} ({values})"


def table(cells: Sequence[dict[str, Any]], variants: Sequence[str], seeds: int, beam: int) -> str:
    """One row a variant: exact match in per cent by seed and their mean, parameters, and seconds of training."""
    headers = ["variant", *(f"seed {seed}" for seed in range(seeds)), "mean"]
    headers += [f"mean, beam {beam}"] if beam > 1 else []
    headers += ["parameters", "train s", "cpu s", "status"]
    body = [_row(name, [c for c in cells if c["variant"] == name], beam) for name in variants]
    return layout.table(headers, body)


def legend(settings: DatesSettings) -> str:
    """What the columns mean."""
    return (
        f"seed and mean: % of {settings.examples} dates that greedy decoding writes whole and right, within "
        f"{TEST_FILLER[0]}-{TEST_FILLER[1]} characters of filler a side (training: {TRAINING_FILLER[0]}-{TRAINING_FILLER[1]}); "
        f"{settings.recipe.steps} steps each; train s: by the clock; cpu s: of all {settings.threads} threads; "
        f"{NONE}: no attention, the trivial level"
    )


def _row(name: str, cells: Sequence[dict[str, Any]], beam: int) -> list[str]:
    good = [cell["value"] for cell in cells if cell["status"] == "ok"]
    row = [name]
    row += [f"{100 * c['value']['exact']:.1f}" if c["status"] == "ok" else c["status"] for c in cells]
    complete = len(good) == len(cells)
    row.append(_mean(100 * value["exact"] for value in good) if complete else NOT_APPLICABLE)
    if beam > 1:
        row.append(_mean(100 * value["exact_beam"] for value in good) if complete else NOT_APPLICABLE)
    row.append(str(good[0]["parameters"]) if good else NOT_APPLICABLE)
    for word in ("seconds", "cpu_seconds"):
        row.append(_mean(value[word] for value in good) if good else NOT_APPLICABLE)
    words = dict.fromkeys(f"{c['status']}: {c['detail']}" if c["detail"] else c["status"] for c in cells)
    return [*row, "; ".join(words)]


def _mean(values: Any) -> str:
    return f"{fmean(values):.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
