"""The tables of a capacity run, from cells. Needs tabulate, no torch.

The span of all seeds is shown, never the best alone; a cell without a number holds its status word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnlab_evaluations.report import layout
from attnlab_evaluations.tasks.capacity.published import DEVIATIONS, WIDTH, published
from attnlab_evaluations.tasks.capacity.settings import CapacitySettings

TRIVIAL = "trivial"
Cell = dict[str, Any]


def tables(cells: Sequence[Cell], settings: CapacitySettings) -> str:
    """Accuracy, then best loss: one row a variant and one column a number of keys, the trivial level last."""
    answered = _table("accuracy", cells, settings, lambda count: _accuracy([1 / count]))
    lost = _table("loss", cells, settings, lambda count: _loss([0.5]))
    return f"accuracy\n{answered}\n\nbest loss\n{lost}"


def legend(cells: Sequence[Cell], settings: CapacitySettings) -> list[str]:
    """What the numbers mean, and what was done for some variants only."""
    recipe = settings.recipe
    pairs = "every key and value once" if settings.setting == "capacity" else "2 N pairs, the last value counts"
    lines = [
        f"N: keys and values; {settings.setting}: {pairs}; width {recipe.width}; {_seeds(settings.seeds)}, least-most; "
        f"accuracy and half the squared error at each training's least loss, on {recipe.evaluated} fresh sequences; "
        f"{TRIVIAL}: guessing, and answering nothing"
    ]
    if any(_unfinished(cell) for cell in cells):
        lines.append(f"+ a training's {recipe.max_steps} steps were up before its loss stood still")
    unit = dict.fromkeys(c["variant"] for c in cells if (c.get("value") or {}).get("unit_length"))
    if unit:
        lines.append(f"{', '.join(unit)}: keys and queries of unit length, scale 1, no feature map, gates from [v; k]")
    if recipe.width == WIDTH:
        lines.append(DEVIATIONS)
    reasons = (f"{c['variant']}: {c['status']}: {c['detail']}" for c in cells if c["status"] != "ok")
    return [*lines, *dict.fromkeys(reasons)]


def _table(which: str, cells: Sequence[Cell], settings: CapacitySettings, trivial: Callable[[int], str]) -> str:
    beside = settings.recipe.width == WIDTH and which == "loss"
    headers = ["variant", *(f"N={count}" for count in settings.keys), *(["published"] if beside else [])]
    body = []
    for chosen in settings.variants:
        mine = [cell for cell in cells if cell["variant"] == chosen.label]
        row = [chosen.label, *(_span(which, [c for c in mine if c["keys"] == n]) for n in settings.keys)]
        body.append([*row, *([published(chosen, settings.setting)] if beside else [])])
    body.append([TRIVIAL, *map(trivial, settings.keys), *(["0.5"] if beside else [])])
    return layout.table(headers, body)


def _span(which: str, cells: Sequence[Cell]) -> str:
    bad = [cell["status"] for cell in cells if cell["status"] != "ok"]
    if bad or not cells:
        return bad[0] if bad else "not trained"
    values = [cell["value"][which] for cell in cells]
    return (_accuracy if which == "accuracy" else _loss)(values) + ("+" if any(map(_unfinished, cells)) else "")


def _unfinished(cell: Cell) -> bool:
    return (cell.get("value") or {}).get("stopped") == "steps"


def _accuracy(values: Sequence[float]) -> str:
    return _joined(f"{min(values):.2f}", f"{max(values):.2f}")


def _loss(values: Sequence[float]) -> str:
    return _joined(f"{min(values):.2g}", f"{max(values):.2g}")


def _joined(least: str, most: str) -> str:
    return least if least == most else f"{least}-{most}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"
