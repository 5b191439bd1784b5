"""Linearised attention: a kernel's feature map in place of the softmax [Katharopoulos et al. 2020]. Needs torch.

variant: the class and its options. Maps: coordinates, of each coordinate by itself; polynomials, Taylor, DPFP and cosine; favor,
random features of the softmax; hedgehog, learned; cosformer, with a distance of positions.
"""

from attnlab_plugins.linearised.variant import LinearisedAttention

__all__ = ["LinearisedAttention"]
