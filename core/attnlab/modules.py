"""Former module of `MultiHeadAttention`, kept so that old pickles load; it is `attnlab.MultiHeadAttention`."""

from __future__ import annotations

from attnlab.layers.multi_head import GateProjections as GateProjections
from attnlab.layers.multi_head import MultiHeadAttention as MultiHeadAttention
