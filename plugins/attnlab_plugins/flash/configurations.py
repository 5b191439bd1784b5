"""Tile sizes, by kernel, GPU, head width and load. Needs torch, no triton.

What decides, in this order: nothing may spill (a thread has 255 registers, and a spill in the inner loop costs more than a
smaller tile); a block's shared memory must be there; then the larger tile, as each row is read once for every tile across. Eight
warps share the sums of a tile: with four, tiles of this size spill. On sm_90 and sm_100 sides of 64 and more are what their
matrix units (wgmma, tcgen05) take; where extra tensors leave no registers for that, tiles fall to 32 and the older
instructions. Gradients of keys hold two sums, of dk and dv, so their tiles are the smallest. Loads go two or three stages deep
where shared memory holds them. float32 is multiplied exactly, without matrix units, and holds twice the bytes.
The numbers come from compiling alone (`make kernels`): no GPU has timed them.
"""

from __future__ import annotations

from attnlab.engines import Configuration

KERNELS = ("forward", "query_gradient", "key_gradient", "bias_gradient")
Tile = tuple[int, int, int, int]
Loads = tuple[Tile, Tile, Tile, Tile]
"""Tiles by load, 0 to 3: see `launch.Problem.load`."""

_HOPPER: dict[str, dict[int, Loads]] = {
    "forward": {
        64: ((128, 128, 8, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 3), (32, 32, 8, 2)),
        256: ((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2), (32, 32, 8, 2)),
    },
    "query_gradient": {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (32, 32, 8, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (32, 16, 8, 1)),
    },
    "key_gradient": {
        64: ((64, 128, 8, 3), (32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
        128: ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
        256: ((16, 64, 8, 1), (32, 32, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)),
    },
    "bias_gradient": {
        64: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)),
        256: ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)),
    },
}
_SMALL: dict[str, dict[int, Loads]] = {
    "forward": {
        64: ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
        128: ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
        256: ((64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    },
    "query_gradient": {
        64: ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        256: ((32, 16, 8, 2), (32, 16, 8, 2), (32, 16, 8, 1), (32, 16, 8, 1)),
    },
    "key_gradient": {
        64: ((32, 64, 8, 1), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
        128: ((32, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
        256: ((32, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    },
    "bias_gradient": {
        64: ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
        128: ((64, 16, 8, 2), (64, 16, 8, 2), (64, 16, 8, 2), (32, 16, 8, 2)),
        256: ((16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1)),
    },
}
# With 163 KiB, sm_80 holds one stage more of the forward's tiles; the plain one of narrow heads would spill.
_AMPERE = _SMALL | {
    "forward": _SMALL["forward"]
    | {
        32: ((64, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
        128: ((128, 64, 8, 3), (64, 64, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2)),
    }
}
# sm_100 sums in a memory of its own, yet weighs the sums in registers: where rules and extras come on top, tiles of _HOPPER
# spill. There the side that a block walks over is halved, for the other says how often rows are read anew; gradients of keys
# and of the bias, which spilled less in taller tiles, give up stages first. All by compilation alone: no GPU has timed them.
_BLACKWELL = _HOPPER | {
    "forward": _HOPPER["forward"]
    | {
        16: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        32: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        64: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 8, 3), (64, 16, 8, 2)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (32, 32, 8, 2)),
        256: ((128, 32, 8, 2), (128, 32, 8, 2), (128, 16, 8, 2), (32, 32, 8, 2)),
    },
    "query_gradient": _HOPPER["query_gradient"]
    | {
        64: ((128, 64, 8, 3), (128, 32, 8, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 1), (64, 32, 8, 2), (32, 16, 8, 1)),
    },
    "key_gradient": _HOPPER["key_gradient"]
    | {
        16: ((64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
        32: ((64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
        64: ((64, 128, 8, 1), (32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
        128: ((64, 128, 8, 1), (16, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    },
    "bias_gradient": _HOPPER["bias_gradient"] | {256: ((32, 64, 8, 1), (32, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1))},
}
# The registers of sm_120 run out a little before those of sm_86: dropout, softcap and rules by token take half a tile there.
_WORKSTATION = _SMALL | {
    "forward": _SMALL["forward"]
    | {
        16: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2)),
        32: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)),
    },
    "query_gradient": _SMALL["query_gradient"]
    | {
        64: ((128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
        256: ((32, 16, 8, 2), (16, 32, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1)),
    },
    "key_gradient": _SMALL["key_gradient"]
    | {
        16: ((32, 64, 8, 1), (16, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
        32: ((32, 64, 8, 1), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
        64: ((32, 64, 8, 1), (32, 64, 8, 1), (32, 32, 8, 2), (32, 32, 8, 1)),
    },
    "bias_gradient": _SMALL["bias_gradient"] | {64: ((32, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2))},
}
_FLOAT32: dict[str, dict[int, Tile]] = {
    "forward": {64: (64, 64, 8, 1), 128: (32, 32, 8, 1), 256: (32, 32, 8, 1)},
    "query_gradient": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "key_gradient": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
    "bias_gradient": {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 16, 8, 1)},
}
_BY_ARCHITECTURE = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL, 120: _WORKSTATION}


def configuration(kernel: str, arch: int, width: int, size: int, load: int) -> Configuration:
    """The tile of `kernel` for heads of the padded `width` and elements of `size` bytes.

    An architecture that is not listed is taken for one with little shared memory, whose tiles fit every GPU.
    """
    wide = max(width, 64)
    if size == 4:
        return Configuration(*_FLOAT32[kernel][wide])
    tiles = _BY_ARCHITECTURE.get(arch, _SMALL)[kernel]
    return Configuration(*tiles.get(width, tiles[wide])[load])


def interpreted(length: int) -> Configuration:
    """Tiles for Triton's interpreter: small enough that short inputs have several, larger where that would take minutes."""
    side = 16 if length <= 256 else 64
    return Configuration(side, side, 4, 1)
