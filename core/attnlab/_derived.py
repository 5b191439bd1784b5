"""Former module of `Origin`, kept so that old pickles of states load."""

from __future__ import annotations

from attnlab.state.origin import Origin as Origin
