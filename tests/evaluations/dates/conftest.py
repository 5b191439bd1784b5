"""A small recipe, and whole runs of `attnlab dates` on it, with stubbed checks."""

from types import SimpleNamespace

import pytest

TINY = {"steps": 3, "batch": 4, "embedding_dim": 6, "hidden_size": 8}


@pytest.fixture
def tiny(monkeypatch):
    """`tiny(**changes)`: a recipe that trains in no time and learns nothing, on dates with almost no filler."""
    from attnlab_evaluations.tasks.dates import task
    from attnlab_evaluations.tasks.dates.recipe import Recipe

    monkeypatch.setattr(task, "TRAINING_FILLER", (0, 2))
    monkeypatch.setattr(task, "TEST_FILLER", (3, 5))
    return lambda **changes: Recipe(**{**TINY, **changes})


@pytest.fixture
def run(monkeypatch, tiny, machine):
    """`run(out, variants=..., seeds=..., checks=..., trainer=..., pictures=False, **settings)`: one run, its exit code.

    Without pictures heat maps are files that say what would be drawn: drawing takes most of the time.
    """
    from attnlab_evaluations.frame import provenance
    from attnlab_evaluations.tasks.dates import heat_map
    from attnlab_evaluations.tasks.dates import run as module
    from attnlab_evaluations.tasks.dates.settings import DatesSettings

    monkeypatch.setattr(provenance, "collect", lambda _: {**machine, "versions": dict(machine["versions"])})

    def passing(*_, **__):
        return [SimpleNamespace(check="fine", status="passed", message="")]

    def note(path, title, alignments):
        path.write_text(f"{title}: {len(alignments)}", encoding="utf-8")

    draw = heat_map.save

    def run(out, *, variants=("none", "additive"), checks=passing, trainer=None, pictures=False, **more):
        monkeypatch.setattr(heat_map, "save", draw if pictures else note)
        given = {"seeds": 2, "recipe": tiny(), "examples": 6, "threads": 1, **more}
        settings = DatesSettings(variants=tuple(variants), out=out, **given)
        return module.run_dates(settings, run_checks=checks, **({} if trainer is None else {"trainer": trainer}))

    return run
