"""Decisions about lengths, and chunks, in graphs that must serve every length. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def holds(condition: bool) -> bool:
    """Whether a condition on lengths is true; in a graph, whether it is true for every length that the graph serves.

    Asked directly, a graph of `torch.export` or `torch.compile` would be restricted to lengths for which the answer is the same.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    return statically_known_true(condition)


def in_chunks(x: Tensor, axis: int, count: int, size: int) -> Tensor:
    """`x [..., L, *]` with its axis of length L as two, `[..., count, size, *]`; zeros follow the last token, `count * size >= L`."""
    missing = count * size - x.shape[axis]
    after = x.dim() - 1 - axis
    if not holds(missing == 0):
        x = pad(x, (*[0] * (2 * after), 0, missing))
    if torch.compiler.is_compiling():  # a reshape would be restricted to lengths that divide
        return x.unfold(axis, size, size).movedim(-1, axis + 1)
    return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])


def chunks_of(length: int, size: int) -> tuple[int, int]:
    """`(count, size)` of the chunks that hold `length` tokens: one as long as they are, where these are fewer than `size`.

    In a graph at least two of the full size, as torch makes a graph of its own for one.
    """
    if _is_open(length):
        return length // size + 2, size
    size = max(min(length, size), 1)
    return -(-length // size), size


def first_of(x: Tensor, axis: int, length: int) -> Tensor:
    """The first `length` entries of an axis that has as many: a view, but where a graph could not prove that it has."""
    if _is_open(length):
        return x.index_select(axis, torch.arange(length, device=x.device))
    return x.narrow(axis, 0, length)


def _is_open(length: int) -> bool:
    """Whether a graph serves more than one such length."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(length)
