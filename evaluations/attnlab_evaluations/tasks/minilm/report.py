"""The tables of a minilm run and its goals, from cells. Needs tabulate, no torch.

The span of all seeds is shown, never the best alone; a row without numbers holds its status word and reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attnlab
from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.minilm.settings import COSINE, EXACT, MiniLMSettings

NOT_APPLICABLE = "n/a"
Cell = dict[str, Any]
STAGES = {
    "words": "word vectors alone",
    "before": "untrained",
    "weights": "after stage 1, weights",
    "after": "after stage 2, states",
}
"""The rows of a distillation, by the names of their values."""


def table(cells: Sequence[Cell], settings: MiniLMSettings) -> str:
    """One row a variant; of a distillation, one row a stage."""
    return _stages(cells) if settings.distil else _swaps(cells)


def legend(cells: Sequence[Cell], settings: MiniLMSettings) -> list[str]:
    """What the numbers mean, and the reasons of rows without numbers."""
    measures = (
        f"on {settings.sentences} held-out sentences, against the model's own embeddings: cosine: mean; worst: the least; "
        "nearest %: sentences whose nearest other sentence is the same; spearman: ranks of all pairs' cosines"
    )
    good = [cell["value"] for cell in cells if cell["status"] == "ok"]
    lines = [measures]
    if not settings.distil:
        lines.append("difference: the largest of any entry; learned: parameters of the variant, untrained here")
    elif good:
        recipe, seeds = settings.recipe, f"{len(good)} seed{'s' if len(good) > 1 else ''}"
        lines.append(
            f"{settings.variants[0].label}: {seeds}, least-most; {good[0]['learned']} parameters of its own; steps of "
            f"{recipe.batch} sentences: {recipe.weight_steps} on weights, {recipe.state_steps} on states; a training took "
            f"{_span([value['seconds'] for value in good], '.0f')} s by the clock, "
            f"{_span([value['cpu_seconds'] for value in good], '.0f')} s of all {settings.threads} threads"
        )
    if settings.distil:
        reasons = (f"{_name(c)}: {c['status']}: {c['detail']}" for c in cells if c["status"] != "ok")
        lines += dict.fromkeys(reasons)
    return lines


def goals(cells: Sequence[Cell], settings: MiniLMSettings) -> list[dict[str, Any]]:
    """One entry a goal: variant, goal in words, what was found, reached. A cell without a number reaches none."""
    if settings.distil:
        results = [c["value"]["after"]["cosine"] if c["status"] == "ok" else None for c in cells]
        reached = all(value is not None and value >= COSINE for value in results)
        goal = f"a cosine of at least {COSINE:g}"
        return [
            {"variant": settings.variants[0].label, "goal": goal, "found": results, "reached": reached, "form": ".3f"}
        ]
    entries = []
    for chosen, cell in zip(settings.variants, cells, strict=True):
        info = attnlab.info(chosen.name)
        if info.formula != "softmax_dot_product" or "exact" not in (info.capabilities or ()):
            continue
        value = cell["value"]["difference"] if cell["status"] == "ok" else None
        entries.append(
            {
                "variant": chosen.label,
                "goal": f"within {EXACT:g}",
                "found": [value],
                "reached": value is not None and value <= EXACT,
                "form": ".1e",
            }
        )
    return entries


def sentence(goal: dict[str, Any]) -> str:
    """`goal: flash within 1e-05: reached (2.4e-07)`."""
    result = ", ".join(_number(value, goal["form"]) for value in goal["found"])
    return f"goal: {goal['variant']} {goal['goal']}: {'reached' if goal['reached'] else 'missed'} ({result})"


def _swaps(cells: Sequence[Cell]) -> str:
    headers = ["variant", "difference", "cosine", "worst", "nearest %", "spearman", "learned", "status"]
    body = []
    for cell in cells:
        if cell["status"] == "ok":
            value = cell["value"]
            row = [_number(value["difference"], ".1e"), *_measures([value])]
            row.append(str(value["learned"]) if value["learned"] else "-")
        else:
            row = [NOT_APPLICABLE] * 6
        words = f"{cell['status']}: {cell['detail']}" if cell["detail"] else cell["status"]
        body.append([cell["variant"], *row, words])
    return _drawn(headers, body)


def _stages(cells: Sequence[Cell]) -> str:
    headers = ["", "cosine", "worst", "nearest %", "spearman"]
    good = [cell["value"] for cell in cells if cell["status"] == "ok"]
    rows = [
        [title, *(_measures([v[stage] for v in good]) if good else [NOT_APPLICABLE] * 4)]
        for stage, title in STAGES.items()
    ]
    return _drawn(headers, rows)


def _drawn(headers: list[str], body: list[list[str]]) -> str:
    return layout.table(headers, body)


def _measures(values: Sequence[dict[str, Any]]) -> list[str]:
    """Cosine, worst, nearest and Spearman, each as the span of `values`."""
    percent = [100 * value["nearest"] for value in values]
    results = [_span([v[word] for v in values], ".3f") for word in ("cosine", "cosine_worst")]
    return [*results, _span(percent, ".1f"), _span([v["spearman"] for v in values], ".3f")]


def _span(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return NOT_APPLICABLE
    least, most = format(min(known), form), format(max(known), form)
    return least if least == most else f"{least}-{most}"


def _number(value: float | None, form: str) -> str:
    return NOT_APPLICABLE if value is None else format(value, form)


def _name(cell: Cell) -> str:
    return f"{cell['variant']}, seed {cell['seed']}"
