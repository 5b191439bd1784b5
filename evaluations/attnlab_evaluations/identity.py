"""What a cell is the result of: the inputs of its key. Needs attnlab's registry.

Loading a variant to find its source imports torch.

A key changes with anything its numbers depend on, so a finished cell is never mistaken for another.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attnlab
from attnlab import AttnlabError
from attnlab_evaluations import provenance
from attnlab_evaluations.records import key_of
from attnlab_evaluations.rows import NULL
from attnlab_evaluations.settings import REFERENCE

TASK_VERSION = 1
"""Grows when a metric's meaning changes; it is part of every key."""


@dataclass(frozen=True)
class Identity:
    """What every key of a run shares; `extended` adds a workload's part."""

    machine: Mapping[str, Any]
    seed: int
    device: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, **more: Any) -> Identity:
        return Identity(self.machine, self.seed, self.device, {**self.more, **more})

    def key(self, variant: str, coordinates: Mapping[str, Any], metric: str) -> str:
        """The key of one cell."""
        return key_of(
            {
                "task": TASK_VERSION,
                "machine": self.machine,
                "seed": self.seed,
                "device": self.device,
                **self.more,
                "variant": variant_identity(REFERENCE if variant == NULL else variant),
                "as": variant,
                "coordinates": coordinates,
                "metric": metric,
            }
        )


@functools.cache
def variant_identity(name: str) -> dict[str, Any]:
    """What makes a variant itself: target, options, its distribution and version, its source's hash."""
    info = attnlab.info(name)
    source = None
    try:
        found = inspect.getsourcefile(attnlab.default_registry().variant_class(name))
        source = provenance.file_digest(Path(found)) if found else None
    except (AttnlabError, TypeError, OSError):
        pass  # it cannot be loaded; the gate says so
    row = provenance.file_digest(info.file) if info.file is not None and info.file.is_file() else None
    return {
        "name": name,
        "target": info.target,
        "options": info.options,
        "owner": info.owner,
        "owner_version": provenance.version(info.owner) if info.owner else None,
        "source": source,
        "registry": row if source is None else None,
    }
