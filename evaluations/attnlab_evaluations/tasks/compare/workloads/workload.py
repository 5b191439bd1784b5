"""What a workload is: where inputs come from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnlab_evaluations.tasks.compare.problems import Problem


@dataclass(frozen=True)
class WorkloadSettings:
    """What a run passes on: the seed, lengths for workloads that have a choice, the device."""

    seed: int = 0
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    device: str = "cpu"
    extra: dict[str, Any] = field(default_factory=dict)


class Workload(Protocol):
    """`version` grows when the inputs change, so that old records are stale; `share` is its part of time."""

    name: str
    summary: str
    version: int
    share: float

    def unavailable(self) -> str | None:
        """One sentence that says what to install, or None. Imports nothing heavy."""

    def problems(self, settings: WorkloadSettings) -> Sequence[Problem]:
        """The problems, smallest first; inputs are built when a problem's turn comes."""

    def facts(self, settings: WorkloadSettings) -> dict[str, Any]:
        """What belongs into keys and provenance: hashes of data and weights. Comes after `problems`."""
