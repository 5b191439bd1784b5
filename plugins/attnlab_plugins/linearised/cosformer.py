"""cosFormer: rectified features, and a cosine that lowers the weight of what is far away [Qin et al. 2022]. Needs torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlab import InvalidInput, Reason, Request, Visibility


def cosformer(x: Tensor, positions: Tensor, longest: int) -> Tensor:
    """`[relu(x) cos(a), relu(x) sin(a)]`, `a = pi i / 2M` at position i: `[B, H, L, 2D]`; positions `[L]` or `[B, L]`.

    By `cos(a) cos(b) + sin(a) sin(b) = cos(a - b)` the kernel is `relu(q)^T relu(k) cos(pi (i - j) / 2M)`.
    """
    angle = positions.to(x.dtype) * (math.pi / 2 / longest)
    angle = angle[:, None] if angle.dim() == 1 else angle[:, None, :, None]
    x = torch.relu(x)
    return torch.cat([x * angle.cos(), x * angle.sin()], -1)


def too_long(request: Request, longest: int) -> list[Reason]:
    """A reason for each length that lets positions be further apart than M, where the cosine turns negative."""
    return [
        Reason(word, f"{length} {noun}", f"up to max_length={longest}", "create it with a larger max_length")
        for word, noun, length in (
            ("query_length", "queries", request.query_length),
            ("key_length", "keys", request.key_length),
        )
        if length > longest
    ] + [
        Reason(
            "offset",
            f"offset={request.offset}",
            f"positions below max_length={longest}",
            "create it with a larger max_length",
        )
        for last in [request.query_length - 1 + abs(request.offset)]
        if request.offset and last > longest and not request.asks("window")
    ]


def require_near(subject: str, visibility: Visibility | None, longest: int) -> None:
    """`InvalidInput` where an offset puts a query further than M from a key that it may see.

    Offsets in a tensor are not looked at: what they say is the caller's affair, as everywhere.
    """
    if visibility is None or isinstance(visibility.offset, Tensor):
        return
    behind = visibility.offset + visibility.query_length - 1  # from the last query back to the first key
    ahead = 0 if visibility.right is not None else visibility.key_length - 1 - visibility.offset
    if max(behind, ahead) > longest:
        raise InvalidInput(
            f"{subject}: positions of a query and a key may be up to max_length={longest} apart, got offset={visibility.offset} "
            f"with {visibility.query_length} queries and {visibility.key_length} keys; create it with a larger max_length"
        )
