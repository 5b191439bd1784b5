"""Feature maps of each coordinate by itself, P = D features [Katharopoulos et al. 2020]. Needs torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from attnlab_plugins.linearised.polynomials import in_range

COORDINATE_MAPS = ("elu", "relu", "squared_relu", "exp")


def of_coordinates(kind: str, x: Tensor, role: Literal["query", "key"]) -> Tensor:
    """`[B, H, L, D]` of `x [B, H, L, D]`, by one of `COORDINATE_MAPS`."""
    if kind == "elu":
        return torch.relu(x) + x.clamp(max=0).exp_()
    if kind == "relu":
        return torch.relu(x)
    if kind == "squared_relu":
        return torch.relu(in_range(x)).square()
    if role == "query":
        return exp_below_top(x)
    return torch.exp(x.clamp(max=largest_exponent(x.dtype)))


def exp_below_top(x: Tensor) -> Tensor:
    """`exp(x)` divided by its row's largest: a factor of a query, which the quotient cancels."""
    features = torch.exp(x - x.detach().amax(-1, keepdim=True))
    # Where a feature nearly underflows its derivative is 0 times a number that may overflow: 0 from the start.
    return features.masked_fill(features < torch.finfo(x.dtype).tiny ** 0.75, 0)


def largest_exponent(dtype: torch.dtype) -> float:
    """What a key's exponents are held to, so that sums of features stay finite."""
    return 600.0 if dtype == torch.float64 else 60.0
