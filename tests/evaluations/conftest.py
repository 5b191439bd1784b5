"""A whole run on tiny inputs, with stubbed checks and few rounds; and its records as they were written."""

import functools
import json
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def machine():
    """What provenance finds, looked for once: an edit while tests run is no other run's business."""
    from attnlab_evaluations.frame import provenance

    return provenance.collect(1)


@pytest.fixture
def run(monkeypatch, machine):
    """`run(out, variants=..., checks=..., workloads=..., lengths=..., ...)`: one `attnlab compare`, its exit code."""
    from attnlab_evaluations.frame import provenance
    from attnlab_evaluations.tasks.compare import cells
    from attnlab_evaluations.tasks.compare import run as compare
    from attnlab_evaluations.tasks.compare.settings import Settings
    from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep

    # Three rounds of single calls: these tests look at the bookkeeping, not at the times.
    monkeypatch.setattr(cells, "measure", functools.partial(cells.measure, max_rounds=3, sample_seconds=0.0))
    monkeypatch.setattr(provenance, "collect", lambda _: dict(machine))

    def passing(*_, **__):
        return [SimpleNamespace(check="fine", status="passed", message="")]

    def run(out, *, variants=("dot_product", "linearised"), checks=passing, workloads=None, **more):
        given = {"lengths": (16,), "budget": 60.0, "threads": 1, **more}
        chosen = Settings(variants=tuple(variants), workloads=("sweep",), out=out, **given)
        return compare.run_compare(chosen, workloads or [Sweep()], run_checks=checks)

    return run


@pytest.fixture
def records():
    """Every line as written; reading through `Records` would leave out what lacked time or memory."""

    def records(out):
        lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return records
