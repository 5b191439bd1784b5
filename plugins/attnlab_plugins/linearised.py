"""Linearised attention: a kernel's feature map in place of the softmax [Katharopoulos et al. 2020]. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from attnlab import FeatureMapAttention, InvalidInput

FEATURE_MAPS = ("elu", "relu", "squared_relu", "exp")


class LinearisedAttention(FeatureMapAttention):
    """`o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)`, Katharopoulos et al. 2020, "Transformers are RNNs", eq. 5.

    `feature_map` chooses phi, applied to each coordinate x:

    - `"elu"`: `elu(x) + 1` (their eq. 7), computed as `max(x, 0) + exp(min(x, 0))`, which does not cancel below 0.
    - `"relu"`: `max(x, 0)`.  `"squared_relu"`: `max(x, 0)^2`.
    - `"exp"`: `exp(x)`, for the query divided by its row's largest feature, which cancels in the quotient, and 0 below 10^-28
      (in float32); for the key held to `exp(60)` (float64: `exp(600)`), so that sums of features stay finite.

    A query whose kernel values sum to 0 or nearly underflow (below 10^-33 in float32: possible under relu, and where features of
    elu or exp underflow) gets 0. Parameter-free.
    """

    name = "linearised"
    formula = "linearised"
    capabilities = replace(FeatureMapAttention.capabilities, compiles=True, exports=True)

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: str = "elu",
    ) -> None:
        if feature_map not in FEATURE_MAPS:
            raise InvalidInput(
                f"linearised: feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}"
            )
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        self.options = {"feature_map": feature_map}
        if "relu" in feature_map:
            self.narrow(
                normalised="all kernel values of a query can be exactly 0 under relu; its output is then 0"
            )

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        kind = self.options["feature_map"]
        if kind == "elu":
            return torch.relu(x) + x.clamp(max=0).exp_()
        if kind == "relu":
            return torch.relu(x)
        if kind == "squared_relu":
            return torch.relu(x).square()
        if role == "query":
            features = torch.exp(x - x.detach().amax(-1, keepdim=True))
            # Where a feature nearly underflows its derivative is 0 times a number that may overflow: 0 from the start.
            return features.masked_fill(features < torch.finfo(x.dtype).tiny ** 0.75, 0)
        return torch.exp(x.clamp(max=600.0 if x.dtype == torch.float64 else 60.0))

    def num_features(self) -> int:
        return self.key_dim
