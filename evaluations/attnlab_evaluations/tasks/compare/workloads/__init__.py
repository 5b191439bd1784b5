"""Workloads of `attnlab compare`. Plugins add theirs through the hook `attnlab_workloads`. Importing this imports no torch."""

from __future__ import annotations

from attnlab_evaluations.tasks.compare.workloads.minilm import MiniLM
from attnlab_evaluations.tasks.compare.workloads.sweep import Sweep
from attnlab_evaluations.tasks.compare.workloads.workload import Workload, WorkloadSettings

__all__ = ["Workload", "WorkloadSettings", "builtin"]


def builtin() -> list[Workload]:
    """The two workloads of the main job."""
    return [MiniLM(), Sweep()]
