"""Former module of `AttentionMask`, kept so that old pickles load; it is `attnlab.AttentionMask`."""

from __future__ import annotations

from attnlab.visibility import AttentionMask as AttentionMask
