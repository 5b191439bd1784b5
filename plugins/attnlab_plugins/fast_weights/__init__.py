"""Fast weight programmers: a memory that each token writes to, by a sum or a correction, fading or not. Needs torch.

variants: the four formulas, by attnlab's own products and kernels; fla: the same four by those of `flash-linear-attention`,
imported only by who asks for one of these.
"""

from attnlab_plugins.fast_weights.variants import (
    DeltaRuleAttention,
    FastWeightsAttention,
    GatedAttention,
    GatedDeltaAttention,
)

__all__ = ["DeltaRuleAttention", "FastWeightsAttention", "GatedAttention", "GatedDeltaAttention"]
