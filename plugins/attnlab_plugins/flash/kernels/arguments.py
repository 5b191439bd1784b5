"""What kernels take besides tensors, grouped: the launcher fills these, kernels read their fields. Needs the standard library.

A field that is None is a rule or feature that the call does not have; each combination compiles to a kernel of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Marks(NamedTuple):
    """Marks of single tokens, and what follows from them for blocks. Pointers stand at item 0; rows are contiguous.

    query_segments, key_segments: int64 `[B, L]`, equal where a pair is visible. key_positions: int32 `[B, Lk]`.
    key_present: uint8 `[B, Lk]`. hull: int32 `[B, 5]` and spans: int32 `[B, blocks, 2]`, see `spans`.
    """

    query_segments: Any
    key_segments: Any
    key_positions: Any
    key_present: Any
    hull: Any
    spans: Any


class Extras(NamedTuple):
    """Tensors over pairs with their strides, and the seed of dropout, int64 `[1]`."""

    bias: Any
    bias_strides: Any
    allowed: Any
    allowed_strides: Any
    seeds: Any


class Scoring(NamedTuple):
    """Numbers. scale: of products, above 0; in units of log2 where there is no softcap, natural where there is one.

    dropout_p: the share of weights that is dropped; keep_scale: `1 / (1 - dropout_p)`.
    """

    scale: Any
    softcap: Any
    dropout_p: Any
    keep_scale: Any


class How(NamedTuple):
    """What is known when a kernel is compiled.

    D, DV: widths; BLOCK_D, BLOCK_DV: the powers of two that hold them. BLOCK_M, BLOCK_N: queries and keys of a tile.
    SIGN: of the scale (-1, 0, 1), applied to queries. BOUNDS: what `low` and `high` are: "number", "item" (int32 `[B]`) or
    "query" (int32 `[B, Lq]`). *_PER_QUERY, *_PER_KEY, *_PER_ITEM, *_PER_HEAD: along which axes a bias or mask differs.
    PRECISION: of float32 products. EVEN: the tiles' rows divide the length that a kernel walks. WIDE: offsets inside a tile
    may pass 31 bits. UPCAST: see `tile.product`.
    """

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    SIGN: int
    BOUNDS: str
    BIAS_PER_ITEM: bool
    BIAS_PER_HEAD: bool
    BIAS_PER_QUERY: bool
    BIAS_PER_KEY: bool
    ALLOWED_PER_QUERY: bool
    ALLOWED_PER_KEY: bool
    PRECISION: str
    EVEN: bool
    WIDE: bool
    UPCAST: bool
