"""Former module of `InstalledAttention`, kept so that old pickles of models load."""

from __future__ import annotations

from attnlab.integrations.transformers.installed import InstalledAttention as InstalledAttention
