"""What a cell is the result of: the inputs of its key. Needs attnlab's registry.

Loading a variant to find its source imports torch.

A key changes with anything its numbers depend on, so a finished cell is never mistaken for another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import attnlab
from attnlab import AttnlabError
from attnlab_evaluations.frame import provenance, sources
from attnlab_evaluations.frame.records import key_of
from attnlab_evaluations.measure.claims import original

TASK_VERSION = 2
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
                "variant": variant_identity(original(variant)),
                "as": variant,
                "coordinates": coordinates,
                "metric": metric,
            }
        )


@functools.cache
def variant_identity(name: str) -> dict[str, Any]:
    """What makes a variant itself: target, options, its distribution and version, the hash of the code it runs.

    The hash covers its whole package, the files of its base classes and what those import (`sources.digest_of`).
    """
    info = attnlab.info(name)
    source = None
    try:
        cls = attnlab.default_registry().variant_class(name)
        source = sources.digest_of(cls) or _own_source()
    except (AttnlabError, OSError):
        pass  # it cannot be loaded; the conformance checks says so
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


@functools.cache
def _own_source() -> str:
    return provenance.source_digest(sources.PACKAGES)


def checks_identity() -> list[str]:
    """What the conformance checks of plugins are: names and hashes of their code; attnlab's own are in `source`."""
    from attnlab.hooks import plugin_manager

    result = plugin_manager().gather("attnlab_checks")
    return sorted(f"{getattr(check, 'name', check)}={sources.digest_of(check)}" for check in result)


def forget_sources() -> None:
    """Read all sources again: a process may run twice, with a variant edited in between."""
    variant_identity.cache_clear()
    _own_source.cache_clear()
