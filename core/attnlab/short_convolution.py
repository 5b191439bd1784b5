"""Former module of `ShortConvolution`, kept so that old pickles load; it is in `attnlab.layers`."""

from __future__ import annotations

from attnlab.layers.short_convolution import ConvolvedState as ConvolvedState
from attnlab.layers.short_convolution import ShortConvolution as ShortConvolution
