"""Feature maps and memories: unnormalised sums, frozen features, a memory with two gates. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab import FeatureMapAttention, GateSpec, RecurrentAttention
from attnlab_evaluations.suite_proof.correct._shared import each_head


def linear_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    **rest: Any,
) -> dict[str, Tensor]:
    """scale sum_j (q_i^T k_j) v_j over the visible keys; default scale Dk^-0.5."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    weights = torch.where(visible, torch.einsum("bhid,bhjd->bhij", query, key) * scale, 0)
    return {"out": weights @ value, "weights": weights}


class LinearSumAttention(FeatureMapAttention):
    """`o_i = scale q_i^T sum_j k_j v_j^T`, neither mapped nor normalised: ONNX LinearAttention-27, mode "linear"."""

    name = "linear_sum"
    formula = "linear_sum"
    definition = staticmethod(linear_sum)
    capabilities = replace(FeatureMapAttention.capabilities, scale=True, normalised=False)
    normalise = False

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return x


def random_relu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: None,
    **rest: Any,
) -> dict[str, Tensor]:
    """Normalised phi(q_i)^T phi(k_j) with phi(x) = relu(W_h x) + 0.001."""
    key, value = each_head(key, query.shape[1]), each_head(value, query.shape[1])
    w = parameters["W"]
    q, k = (torch.relu(torch.einsum("hpd,bhid->bhip", w, x)) + 1e-3 for x in (query, key))
    a = torch.where(visible, torch.einsum("bhip,bhjp->bhij", q, k), 0)
    weights = a / a.sum(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 1)
    return {"out": weights @ value, "weights": weights}


class RandomReluAttention(FeatureMapAttention):
    """Generalised kernel attention over frozen random features. Choromanski et al. 2020, "Performers", section 2.2 (relu).

    `phi(x) = relu(W_h x) + 0.001`. Parameter: `W [H, features, Dk]`, drawn once and never trained (`requires_grad=False`). One
    key/value head for each query head, as W is indexed by both.
    """

    name = "random_relu"
    formula = "random_relu"
    definition = staticmethod(random_relu)
    capabilities = replace(FeatureMapAttention.capabilities, gqa=False)

    def __init__(self, *, features: int = 12, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"features": features}
        w = torch.randn(self.num_heads, features, self.key_dim)
        self.W = nn.Parameter(w, requires_grad=False)

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return torch.relu(x @ self.W.to(x.dtype).transpose(-1, -2)) + 1e-3


class RandomExponentialAttention(FeatureMapAttention):
    """Softmax attention approximated by positive random features. Choromanski et al. 2020, "Performers", lemma 1.

    `phi(x) = exp(w_p^T x' - |x'|^2 / 2)` with `x' = x Dk^-0.25` and frozen w. The formula is softmax's; how far it is met depends on
    the number of features, so `exact` is given up with that reason.
    """

    name = "random_exponential"
    formula = "softmax_dot_product"
    capabilities = replace(FeatureMapAttention.capabilities, exact=False).narrow(
        exact="random features approximate softmax with an error that their number sets"
    )

    W: Tensor

    def __init__(self, *, features: int = 32, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"features": features}
        self.register_buffer("W", torch.randn(features, self.key_dim))

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        x = x * self.key_dim**-0.25
        exponent = x @ self.W.to(x.dtype).transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2
        return torch.exp(exponent.clamp(max=40.0)) + 1e-6

    def num_features(self) -> int:
        return int(self.options["features"])


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    gates: Mapping[str, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """S_t = D_t S_{t-1} + beta_t k_t (x) (v_t - (D_t S_{t-1})^T k_t), D_t = diag(exp(g_t)); o_i = scale q_i^T S."""
    heads = query.shape[1]
    key, value = each_head(key, heads), each_head(value, heads)
    beta, decay = each_head(gates["beta"], heads), each_head(gates["log_decay"], heads).exp()
    memory = query.new_zeros(*visible.shape[:3], key.shape[3], value.shape[3])  # one for each query
    for t in range(key.shape[2]):
        k, v = key[:, :, t, None, :], value[:, :, t, None, :]
        faded = decay[:, :, t, None, :, None] * memory
        expected = v - torch.einsum("bhidv,bhid->bhiv", faded, k.expand(*visible.shape[:3], -1))
        written = faded + beta[:, :, t, None, None, None] * k[..., :, None] * expected[..., None, :]
        memory = torch.where(visible[..., t, None, None], written, memory)
    scale = key.shape[3] ** -0.5 if scale is None else scale
    return {"out": torch.einsum("bhid,bhidv->bhiv", query, memory) * scale}


class GatedDeltaAttention(RecurrentAttention):
    """The delta rule with a decay per coordinate. Yang et al. 2024, "Gated Delta Networks", eq. 10, with KDA's vector decay.

    Gates: `beta [B, Hkv, Lk]` in (0, 1), `log_decay [B, Hkv, Lk, Dk]` of 0 or less.
    """

    name = "gated_delta"
    formula = "gated_delta"
    definition = staticmethod(gated_delta)
    capabilities = replace(RecurrentAttention.capabilities, gates=True)
    gates = MappingProxyType(
        {"beta": GateSpec("[B,Hkv,Lk]", range="(0,1)"), "log_decay": GateSpec("[B,Hkv,Lk,Dk]", range="<=0")}
    )

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        decay = gates["log_decay"].exp()
        decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None]  # one number, or one a coordinate
        memory = memory * decay
        expected = value - (key[..., None, :] @ memory)[..., 0, :]
        return memory + gates["beta"][..., None, None] * key[..., :, None] * expected[..., None, :]
