"""Workload `sweep`: random inputs over lengths, causal and not. torch is imported when inputs are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnlab_evaluations.tasks.compare.workloads.workload import WorkloadSettings

if TYPE_CHECKING:
    from attnlab_evaluations.tasks.compare.problems import Part, Problem

BATCH, HEADS, WIDTH = 1, 8, 64


class Sweep:
    """Normal query, key and value, float32, `[1, 8, L, 64]`; gates, where read, are random too."""

    name = "sweep"
    summary = "random inputs [1, 8, L, 64] at each length, causal and not"
    version = 1
    share = 0.85

    def unavailable(self) -> str | None:
        return None

    def facts(self, settings: WorkloadSettings) -> dict[str, Any]:
        return {"batch": BATCH, "heads": HEADS, "width": WIDTH, "dtype": "float32"}

    def problems(self, settings: WorkloadSettings) -> Sequence[Problem]:
        from attnlab_evaluations.tasks.compare.problems import Problem

        def builder(length: int, causal: bool) -> Any:
            return lambda: [inputs(length, causal, settings.seed, settings.device)]

        def outliner(length: int, causal: bool) -> Any:
            return lambda: [outline(length, causal)]

        return [
            Problem(
                coordinates={"length": length, "causal": causal},
                length=length,
                build=builder(length, causal),
                outline=outliner(length, causal),
                random_gates=True,
            )
            for length in sorted(settings.lengths)
            for causal in (False, True)
        ]


def outline(length: int, causal: bool) -> Part:
    """The sizes of `inputs` at one length, on torch's device "meta": no memory is taken, however long."""
    import torch

    from attnlab_evaluations.tasks.compare.problems import Part

    query, key, value = (torch.empty(BATCH, HEADS, length, WIDTH, device="meta") for _ in range(3))
    return Part(query, key, value, causal=causal)


def inputs(length: int, causal: bool, seed: int, device: str = "cpu") -> Part:
    """The inputs at one length: the same for every variant, and the same again for the same seed."""
    import torch

    from attnlab_evaluations.tasks.compare.problems import Part

    generator = torch.Generator().manual_seed(1_000_003 * seed + length)
    query, key, value = (torch.randn(BATCH, HEADS, length, WIDTH, generator=generator).to(device) for _ in range(3))
    return Part(query, key, value, causal=causal)
