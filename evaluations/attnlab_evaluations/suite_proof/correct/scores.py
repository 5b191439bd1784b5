"""Softmax of another score: learned temperatures, positions inside the score, distances, no keys at all. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import ScoreAttention
from attnlab.engines import accumulation_dtype
from attnlab.formulas import per_query_head, softmax_attention, without_absent


def warmed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: Any,
    scale: float | None,
    gates: None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(exp(t_h) q_i^T k_j / sqrt(Dk)) v."""
    key, value = per_query_head(key, query.shape[1]), per_query_head(value, query.shape[1])
    query, key, value = without_absent(query, key, value, visible)
    scores = query @ key.transpose(-1, -2) * parameters["temperature"].exp().view(-1, 1, 1)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, **rest)


class LearnedTemperatureAttention(ScoreAttention):
    """`softmax_j(exp(t_h) q_i^T k_j / sqrt(Dk))`: a temperature per head that starts at 0, where it changes nothing.

    Source: the learned temperature of El-Nouby et al. 2021, "XCiT", eq. 4, on plain attention. Parameter: `temperature [H]`.
    """

    name = "learned_temperature"
    formula = "learned_temperature"
    definition = staticmethod(warmed)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.temperature = nn.Parameter(torch.zeros(self.num_heads))

    def project_query(self, query: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        return query.to(wide) * self.temperature.to(wide).exp()[:, None, None]

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return query @ key.to(query.dtype).transpose(-1, -2)


def euclidean(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: Any,
    options: Any,
    scale: float | None,
    gates: None = None,
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(-|q_i - k_j|^2 * scale) v; default scale 1 / (2 sqrt(Dk))."""
    key, value = per_query_head(key, query.shape[1]), per_query_head(value, query.shape[1])
    query, key, value = without_absent(query, key, value, visible)
    apart = torch.where(visible[..., None], query[..., :, None, :] - key[..., None, :, :], 0)
    scale = 0.5 * key.shape[-1] ** -0.5 if scale is None else scale
    return softmax_attention(-(apart**2).sum(-1), value, visible=visible, scale=scale, **rest)


class EuclideanAttention(ScoreAttention):
    """`softmax_j(-|q_i - k_j|^2 / (2 sqrt(Dk)))`: a Gaussian kernel, normalised.

    Source: Tsai et al. 2019, "Transformer Dissection", section 3.2 (the RBF kernel). Distances are taken pair by pair, as
    `|q|^2 + |k|^2 - 2 q^T k` cancels.
    """

    name = "euclidean"
    formula = "euclidean"
    definition = staticmethod(euclidean)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.tile_cost = self.key_dim

    def default_scale(self) -> float:
        return float(0.5 * self.key_dim**-0.5)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        apart = query.to(wide)[..., :, None, :] - key.to(wide)[..., None, :, :]  # [B, H, tq, tk, D]
        return -apart.square().sum(-1)


def gaussian_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Tensor,
    parameters: dict[str, Tensor],
    options: dict[str, Any],
    scale: float | None,
    gates: None = None,
    positions: tuple[Tensor, Tensor],
    **rest: Any,
) -> dict[str, Tensor]:
    """softmax(-2 (j - i - D tanh(w_h^T q_i))^2 / D^2) v, i and j positions, D = reach."""
    value = per_query_head(value, query.shape[1])
    query = torch.where(visible.any(-1, keepdim=True), query, 0)
    value = torch.where(visible.any(-2).unsqueeze(-1), value, 0)
    reach = options["reach"]
    aim = reach * torch.tanh(torch.einsum("hd,bhid->bhi", parameters["w"], query))
    step = (positions[1][:, None, :] - positions[0][:, :, None])[:, None]  # [B, 1, Lq, Lk]
    scores = -2.0 * (step - aim[..., None]) ** 2 / reach**2
    scale = 1.0 if scale is None else scale
    return softmax_attention(scores, value, visible=visible, scale=scale, positions=positions, **rest)


class GaussianPlaceAttention(ScoreAttention):
    """Each query looks at a place, whatever the keys hold: `softmax_j(-2 (j - i - D tanh(w_h^T q_i))^2 / D^2)`.

    Source: the predicted window of Luong et al. 2015, eq. 9 and 10, alone and relative to the query; the option `reach` is D and
    the standard deviation D / 2. Parameter: `w [H, Dq]`. Keys are never read; default scale 1.
    """

    name = "gaussian_place"
    formula = "gaussian_place"
    definition = staticmethod(gaussian_place)
    capabilities = replace(ScoreAttention.capabilities, position_free=False, query_dim=True)

    def __init__(self, *, reach: float = 4.0, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"reach": reach}
        self.w = nn.Parameter(torch.randn(self.num_heads, self.head_dim) * self.head_dim**-0.5)

    def default_scale(self) -> float:
        return 1.0

    def project_query(self, query: Tensor) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        return torch.tanh(query.to(wide) @ self.w.to(wide)[..., None])  # [B, H, Lq, 1]

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        reach = float(self.options["reach"])
        step = key_positions[..., None, :] - query_positions[..., :, None]  # [tq, tk], or with a batch axis
        step = step[:, None] if step.dim() == 3 else step
        scores: Tensor = -2.0 * (step - reach * query).square() / reach**2
        return scores
