"""Kernels `phi(q_i)^T phi(k_j)` of linearised attention, pair by pair. Needs torch; imported by attnlab.formulas only.

Each takes query and key `[B, H, L, D]` per query head and gives `[B, H, Lq, Lk]`; what stands at hidden pairs is for
the caller to drop. Written from the kernel itself where it has a closed form, else from the features by index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._parts import Positions, pair_products, per_query_head


def taylor(query: Tensor, key: Tensor, *, visible: Tensor, **others: Any) -> Tensor:
    """1 + s + s^2 / 2, s = q^T k / sqrt(D) [Arora et al. 2024, section 4.1]."""
    s = pair_products(query, key, visible) / math.sqrt(query.shape[-1])
    return 1 + s + s * s / 2


def dpfp(query: Tensor, key: Tensor, *, visible: Tensor, options: Mapping[str, Any], **others: Any) -> Tensor:
    """The features r_a r_b with b = a - i modulo 2D, i = 1 .. nu, of r = [relu x, relu -x] [Schlag et al. 2021, eq. 37, 38]."""

    def features(x: Tensor) -> Tensor:
        rectified = [x[..., d].clamp(min=0) for d in range(x.shape[-1])]
        rectified += [(-x[..., d]).clamp(min=0) for d in range(x.shape[-1])]
        count = len(rectified)
        pairs = [(a, (a - i) % count) for i in range(1, options["nu"] + 1) for a in range(count)]
        return torch.stack([rectified[a] * rectified[b] for a, b in pairs], dim=-1)

    return pair_products(features(query), features(key), visible)


def cosine(query: Tensor, key: Tensor, *, visible: Tensor, **others: Any) -> Tensor:
    """1 + q^T k / (|q| |k|) [Li et al. 2020], |x| at least 1e-3, so that the derivative is bounded at 0."""
    q, k = (_directions(x) for x in (query, key))
    return 1 + pair_products(q, k, visible)


def _directions(x: Tensor) -> Tensor:
    size = x.detach().abs().amax(-1, keepdim=True).clamp(min=1)  # squares in range
    scaled = x / size
    return scaled / (scaled**2).sum(-1, keepdim=True).clamp(min=(1e-3 / size) ** 2).sqrt()


def favor(query: Tensor, key: Tensor, *, visible: Tensor, parameters: Mapping[str, Tensor], **others: Any) -> Tensor:
    """The mean over rows w of exp(w^T q' - |q'|^2 / 2) exp(w^T k' - |k'|^2 / 2), x' = x / D^(1/4) [Choromanski et al. 2020, lemma 1].

    Up to one factor per query, which the quotient cancels. Where all factors of a key underflow, its kernel values are 0.
    """
    rows = parameters["w"]  # [m, D]
    root = query.shape[-1] ** 0.25

    def exponents(x: Tensor) -> Tensor:
        x = x / root
        return torch.einsum("bhld,md->bhlm", x, rows) - (x * x).sum(-1, keepdim=True) / 2

    of_query = exponents(query)
    of_query = of_query - of_query.detach().amax(dim=-1, keepdim=True)
    return pair_products(torch.exp(of_query), torch.exp(exponents(key)), visible) / rows.shape[0]


def hedgehog(query: Tensor, key: Tensor, *, visible: Tensor, parameters: Mapping[str, Tensor], **others: Any) -> Tensor:
    """softmax(z)^T softmax(z') + softmax(-z)^T softmax(-z') of z = W_q q + b_q and z' = W_k k + b_k [Zhang et al. 2024, section 4.2]."""
    heads = query.shape[1]
    weight, bias = (per_query_head(parameters[name][None], heads)[0] for name in ("W_k", "b_k"))
    z = torch.einsum("bhld,hed->bhle", query, parameters["W_q"]) + parameters["b_q"][:, None]
    z_key = torch.einsum("bhld,hed->bhle", key, weight) + bias[:, None]
    positive = pair_products(torch.softmax(z, dim=-1), torch.softmax(z_key, dim=-1), visible)
    return positive + pair_products(torch.softmax(-z, dim=-1), torch.softmax(-z_key, dim=-1), visible)


def cosformer(
    query: Tensor,
    key: Tensor,
    *,
    visible: Tensor,
    options: Mapping[str, Any],
    positions: Positions | None,
    **others: Any,
) -> Tensor:
    """relu(q)^T relu(k) cos(pi (i - j) / 2M) for positions i and j [Qin et al. 2022, eq. 8 to 10]."""
    if positions is None:
        raise ValueError("linearised: cosformer needs positions=(query_positions, key_positions)")
    apart = positions[0][:, None, :, None] - positions[1][:, None, None, :]  # [B, 1, Lq, Lk]
    nearness = torch.cos(apart.to(torch.float64) * math.pi / (2 * options["max_length"])).to(query.dtype)
    return pair_products(query.clamp(min=0), key.clamp(min=0), visible) * nearness


KERNELS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"taylor": taylor, "dpfp": dpfp, "cosine": cosine, "favor": favor, "hedgehog": hedgehog, "cosformer": cosformer}
)
