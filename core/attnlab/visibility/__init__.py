"""Which query may attend to which key: `AttentionMask` as a caller states it, `Visibility` as one call resolves it. Needs torch."""

from __future__ import annotations

from attnlab.visibility.mask import AttentionMask, MaskMod, Offset
from attnlab.visibility.resolved import Visibility

__all__ = ["AttentionMask", "MaskMod", "Offset", "Visibility"]
