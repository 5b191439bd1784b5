"""The machinery that families and plugins share: pure torch, any device. Stable for plugins.

heads: grouped-query helpers.  tiled: online softmax over tiles of any score.  fused: torch's fused kernels.  banded: inside
a window.  additive: the score v^T tanh(q + k) of a tile.  linear: prefix sums of feature maps, chunked and stepwise.  scan: a recurrence, token by token.
"""

from attnlab.engines.additive import additive_projection, additive_scores, by_blocks
from attnlab.engines.banded import Band, band_of, banded_attention
from attnlab.engines.fused import MASK_ELEMENTS, fused_attention, fused_step
from attnlab.engines.heads import accumulation_dtype, expand_heads, fold_groups, in_own_precision
from attnlab.engines.linear import align_to_queries, causal_linear, causal_linear_blocks, read_sums
from attnlab.engines.scan import scan_recurrence
from attnlab.engines.tiled import Scoring, tiled_attention

__all__ = [
    "MASK_ELEMENTS",
    "Band",
    "Scoring",
    "accumulation_dtype",
    "additive_projection",
    "additive_scores",
    "align_to_queries",
    "band_of",
    "banded_attention",
    "by_blocks",
    "causal_linear",
    "causal_linear_blocks",
    "expand_heads",
    "fold_groups",
    "fused_attention",
    "fused_step",
    "in_own_precision",
    "read_sums",
    "scan_recurrence",
    "tiled_attention",
]
