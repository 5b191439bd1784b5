"""The class and its options; which map makes which features is one file each beside this one. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from attnlab import FeatureMapAttention, InvalidInput
from attnlab_plugins.linearised.coordinates import COORDINATE_MAPS, of_coordinates
from attnlab_plugins.linearised.polynomials import cosine, dpfp, taylor

FEATURE_MAPS = (*COORDINATE_MAPS, "taylor", "dpfp", "cosine")
# Which map an option belongs to, and the least that it may be.
OPTIONS: Mapping[str, tuple[str, int]] = {"nu": ("dpfp", 1)}
ALL_ZERO = "all kernel values of a query can be exactly 0 under {}; its output is then 0"
# Maps whose normaliser can vanish.
VANISHING: Mapping[str, str] = {
    "relu": ALL_ZERO.format("relu"),
    "squared_relu": ALL_ZERO.format("relu"),
    "dpfp": ALL_ZERO.format("dpfp"),
    "cosine": "a query whose keys all point the opposite way has kernel values of 0",
}


class LinearisedAttention(FeatureMapAttention):
    """`o_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)`, Katharopoulos et al. 2020, "Transformers are RNNs", eq. 5.

    `feature_map` chooses phi. D is the width of a head, P the number of features. Of each coordinate x, P = D:

    - `"elu"`: `elu(x) + 1` (their eq. 7), computed as `max(x, 0) + exp(min(x, 0))`, which does not cancel below 0.
    - `"relu"`: `max(x, 0)`.  `"squared_relu"`: `max(x, 0)^2`.
    - `"exp"`: `exp(x)`, for the query divided by its row's largest feature, which cancels in the quotient, and 0 below 10^-28
      (in float32); for the key held to `exp(60)` (float64: `exp(600)`), so that sums of features stay finite.

    Of the whole vector x:

    - `"taylor"`: `[1, x', (x' (x) x') / sqrt(2)]` with `x' = x / D^(1/4)`, P = 1 + D + D^2; Arora et al. 2024, "Simple linear
      attention language models balance the recall-throughput tradeoff" (Based), section 4.1. The kernel is the second-order
      Taylor polynomial of the softmax's, `1 + s + s^2 / 2` with `s = q^T k / sqrt(D)`: at least 1/2, so nothing vanishes.
    - `"dpfp"`: `r * roll(r, i)` for i = 1 .. `nu`, `r = [relu(x), relu(-x)]`, P = 2 D nu; Schlag et al. 2021, "Linear Transformers
      Are Secretly Fast Weight Programmers", eq. 37 and 38. `nu` (default 1) is at most 2 D - 1. Keys may meet none of a
      query's features.
    - `"cosine"`: `[1, x / |x|]`, P = 1 + D; Li et al. 2020, "Linear Attention Mechanism", the first-order Taylor polynomial of
      the softmax's kernel for unit vectors, `1 + cos(q, k)`. It is 0 for opposite vectors, and 1 where either is 0. Where all
      that a query sees lies opposite to it, the quotient is of rounding errors: finite, and without a meaning.

    A query whose kernel values sum to 0 or nearly underflow (below 10^-33 in float32: possible under relu and dpfp, and where
    features of elu or exp underflow) gets 0. Parameter-free.
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
        nu: int | None = None,
    ) -> None:
        given = {"nu": nu}
        _judge(feature_map, given)
        super().__init__(
            num_heads=num_heads,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        self.options = {"feature_map": feature_map, **given}
        if feature_map in VANISHING:
            self.narrow(normalised=VANISHING[feature_map])
        if feature_map == "dpfp":
            self._default(nu=1)
            if self.options["nu"] >= 2 * self.key_dim:
                raise InvalidInput(
                    f"linearised: nu must be below 2 * {self.key_dim}, the number of rectified coordinates, got {nu}"
                )

    def _default(self, **values: Any) -> None:
        """Settle options that were left out."""
        self.options |= {word: x for word, x in values.items() if self.options[word] is None}

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        kind = self.options["feature_map"]
        if kind in COORDINATE_MAPS:
            return of_coordinates(kind, x, role)
        if kind == "taylor":
            return taylor(x)
        if kind == "dpfp":
            return dpfp(x, self.options["nu"])
        return cosine(x)

    def num_features(self) -> int:
        width, kind = self.key_dim, self.options["feature_map"]
        if kind == "taylor":
            return 1 + width + width * width
        if kind == "dpfp":
            return 2 * width * int(self.options["nu"])
        return 1 + width if kind == "cosine" else width


def _judge(feature_map: str, given: Mapping[str, Any]) -> None:
    if feature_map not in FEATURE_MAPS:
        raise InvalidInput(
            f"linearised: feature_map must be one of {', '.join(FEATURE_MAPS)}, got {feature_map!r}"
        )
    for word, value in given.items():
        owner, least = OPTIONS[word]
        if value is None:
            continue
        if feature_map != owner:
            raise InvalidInput(
                f"linearised: {word} is an option of feature_map {owner!r} alone, got {word}={value!r} with {feature_map!r}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(f"linearised: {word} must be an int of {least} or more, got {value!r}")
