"""A small recipe, and whole runs of `attnlab capacity` on it, with stubbed checks."""

from types import SimpleNamespace

import pytest

TINY = {"width": 4, "max_steps": 4, "batch": 3, "every": 2, "evaluated": 5}


@pytest.fixture
def tiny():
    """`tiny(**changes)`: a recipe that trains in no time and learns nothing."""
    from attnlab_evaluations.tasks.capacity.recipe import Recipe

    return lambda **changes: Recipe(**{**TINY, **changes})


@pytest.fixture
def run(monkeypatch, tiny, machine):
    """`run(out, *names, checks=..., trainer=..., **settings)`: one run at 3 keys, its exit code."""
    from attnlab_evaluations.frame import provenance
    from attnlab_evaluations.frame.chosen import choose
    from attnlab_evaluations.tasks.capacity import run as module
    from attnlab_evaluations.tasks.capacity.settings import CapacitySettings

    monkeypatch.setattr(provenance, "collect", lambda _: dict(machine))

    def passing(*_, **__):
        return [SimpleNamespace(check="fine", status="passed", message="")]

    def run(out, *names, checks=passing, trainer=None, **more):
        given = {"seeds": 2, "keys": (3,), "recipe": tiny(), **more}
        chosen = choose("capacity", names or ("dot_product", "linearised"))
        settings = CapacitySettings(variants=chosen, out=out, **given)
        return module.run_capacity(settings, run_checks=checks, **({} if trainer is None else {"trainer": trainer}))

    return run
