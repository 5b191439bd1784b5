"""Modules at model width: `MultiHeadAttention`, gate projections and a short convolution."""
