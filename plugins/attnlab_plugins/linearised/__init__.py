"""Linearised attention: a kernel's feature map in place of the softmax [Katharopoulos et al. 2020]. Needs torch.

variant: the class and its options.  coordinates: maps of each coordinate.  polynomials: maps that are polynomials of the
coordinates, or of the direction.
"""

from attnlab_plugins.linearised.variant import LinearisedAttention

__all__ = ["LinearisedAttention"]
