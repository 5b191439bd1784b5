"""Which variants there are, from which files, and how a name becomes a module. Needs no torch."""

from __future__ import annotations

from attnlab.registry._registry import Registry
from attnlab.registry.info import VariantInfo
from attnlab.registry.layers import LayerFile

__all__ = ["LayerFile", "Registry", "VariantInfo"]
