"""Linearised attention. Needs torch.

Source: Katharopoulos et al. 2020, "Transformers are RNNs", eq. 4 (eq. 5 and 6 are its factored forms):

    o_i = sum_j phi(q_i)^T phi(k_j) v_j / sum_j phi(q_i)^T phi(k_j)        over the visible j

Feature maps of each coordinate: elu(x) + 1 (eq. 7), relu(x), relu(x)^2, exp(x). Kernels phi(q)^T phi(k) of whole
vectors are in `_kernels`. Written here as the quadratic sum over pairs, not as the factored form that
implementations use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attnlab.formulas._kernels import KERNELS
from attnlab.formulas._parts import Positions, ScoreMod, mix, pair_products, per_query_head, without_absent

FEATURE_MAPS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "elu": lambda x: torch.nn.functional.elu(x) + 1,
        "relu": torch.relu,
        "squared_relu": lambda x: torch.relu(x) ** 2,
        "exp": torch.exp,
    }
)

LEAST_TOTAL: Mapping[str, float] = MappingProxyType(dict.fromkeys(("relu", "squared_relu", "dpfp", "cosformer"), 1e-6))
"""What the normaliser is at least, where all features shrink with their token (cosFormer's code: `clamp_min(..., 1e-6)`)."""


def linearised(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Mapping[str, Tensor],
    options: Mapping[str, Any],
    scale: float | Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Tensor | None = None,
    gates: Mapping[str, Tensor] | None = None,
    positions: Positions | None = None,
) -> dict[str, Tensor]:
    """phi(q_i)^T phi(k_j), normalised over the visible keys, times value.

    `options["feature_map"]` names phi (elu where none is named); other options, parameters and positions are read by
    the kernels that need them. A scale cancels or is no part of the formula: giving one is a `ValueError`, as are the
    arguments of score formulas. A row whose products are all zero has no quotient: its weights and output are 0.
    """
    for name, inputs in (
        ("scale", scale),
        ("bias", bias),
        ("softcap", softcap),
        ("score_mod", score_mod),
        ("sinks", sinks),
    ):
        if inputs is not None:
            raise ValueError(f"linearised: {name} is no part of this formula")
    heads = query.shape[1]
    key, value = per_query_head(key, heads), per_query_head(value, heads)
    query, key, value = without_absent(query, key, value, visible)
    name = options.get("feature_map", "elu")
    if name in KERNELS:
        products = KERNELS[name](
            query, key, visible=visible, parameters=parameters, options=options, positions=positions
        )
    elif name == "exp" and _out_of_range(query, key):
        products = _exp_products(query, key, visible)
    else:
        phi = FEATURE_MAPS[name]
        products = pair_products(phi(query), phi(key), visible)
    products = torch.where(visible, products, 0)
    total = products.sum(dim=-1, keepdim=True)
    if name in LEAST_TOTAL:
        total = total.clamp(min=LEAST_TOTAL[name])
    total = torch.where(total == 0, 1, total)
    # Two sums and their quotient, as eq. 4 has it. Weights first would make a single weight 1 exactly, and hide from the plain
    # formula's error in lower dtypes how badly conditioned a small kernel value's quotient is.
    return {"out": mix(products, value, visible) / total, "weights": products / total}


def _out_of_range(query: Tensor, key: Tensor) -> bool:
    """Whether exp(q) * exp(k) could leave the dtype's range."""
    largest = max((float(x.detach().abs().nan_to_num(0).max()) for x in (query, key) if x.numel()), default=0.0)
    limit = 0.4 * float(torch.tensor(torch.finfo(query.dtype).max, dtype=torch.float64).log())
    return largest > limit


def _exp_products(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """sum_d exp(q_id + k_jd) up to one factor per row, which the quotient cancels."""
    inside = query.unsqueeze(-2) + key.unsqueeze(-3)  # [B, H, Lq, Lk, D]
    logs = torch.logsumexp(torch.where(visible.unsqueeze(-1), inside, 0), dim=-1)  # [B, H, Lq, Lk]
    logs = torch.where(visible, logs, -torch.inf)
    top = logs.detach().amax(dim=-1, keepdim=True) if logs.shape[-1] else logs.new_zeros(*logs.shape[:-1], 1)
    return torch.exp(logs - torch.where(top.isfinite(), top, 0))
