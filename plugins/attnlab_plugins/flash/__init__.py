"""The variant `flash`: own Triton kernels on CUDA, torch's flash kernel elsewhere. Imports no triton; needs torch."""

from attnlab_plugins.flash.variant import FlashAttention

__all__ = ["FlashAttention"]
