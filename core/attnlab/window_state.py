"""Former module of `WindowState`, kept so that old pickles load; it is `attnlab.WindowState`."""

from __future__ import annotations

from attnlab.state import WindowState as WindowState
