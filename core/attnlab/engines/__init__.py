"""The machinery that families and plugins share: torch on any device, Triton kernels on CUDA. Stable for plugins.

heads: grouped-query helpers.  tiled: online softmax over tiles of any score.  fused: torch's fused kernels.  banded: inside
a window.  additive: the score v^T tanh(q + k) of a tile.  linear: prefix sums of feature maps, chunked and stepwise.  scan: a
recurrence, token by token.  chunked_recurrence: fast weights, by sums, corrections and decays.
lengths: decisions on lengths that no graph may depend on.  unit_length: normalised vectors.  triton_launch: where Triton kernels serve and how they are launched; triton itself is imported by use.
"""

from attnlab._lengths import holds
from attnlab.engines.additive import additive_projection, additive_scores, additive_tile_cost
from attnlab.engines.banded import Band, band_of, banded_attention
from attnlab.engines.chunked_recurrence import chunked_recurrence
from attnlab.engines.fused import MASK_ELEMENTS, FusedSoftmax, fused_attention, fused_step
from attnlab.engines.heads import accumulation_dtype, expand_heads, fold_groups, in_own_precision
from attnlab.engines.linear import align_to_queries, causal_linear, causal_linear_blocks, read_sums
from attnlab.engines.scan import scan_recurrence
from attnlab.engines.tiled import Scoring, tiled_attention
from attnlab.engines.triton_launch import (
    SHARED_MEMORY,
    Ahead,
    Configuration,
    architecture,
    compiling_ahead,
    is_interpreted,
    kernels_can_run,
    kernels_serve,
    run_kernel,
)
from attnlab.engines.unit_length import unit_length
from attnlab.validation.fast_path import FastPath

__all__ = [
    "MASK_ELEMENTS",
    "SHARED_MEMORY",
    "Ahead",
    "Band",
    "Configuration",
    "FastPath",
    "FusedSoftmax",
    "Scoring",
    "accumulation_dtype",
    "additive_projection",
    "additive_scores",
    "additive_tile_cost",
    "align_to_queries",
    "architecture",
    "band_of",
    "banded_attention",
    "causal_linear",
    "causal_linear_blocks",
    "chunked_recurrence",
    "compiling_ahead",
    "expand_heads",
    "fold_groups",
    "fused_attention",
    "fused_step",
    "holds",
    "in_own_precision",
    "is_interpreted",
    "kernels_can_run",
    "kernels_serve",
    "read_sums",
    "run_kernel",
    "scan_recurrence",
    "tiled_attention",
    "unit_length",
]
