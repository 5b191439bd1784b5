"""Correct scores as an author writes them: one or two methods of `ScoreAttention` each. Needs torch.

Where the formula is none of attnlab's own, the definition stands beside the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab import InvalidInput, Reason, Request, ScoreAttention
from attnlab.formulas import per_query_head, softmax_attention, without_absent

# Their tiny cases form one tile, which holds every pair.
SCORE = replace(ScoreAttention.capabilities, linear_memory=False)


def wide(x: Tensor) -> Tensor:
    """float64 as it is, everything narrower in float32."""
    return x if x.dtype == torch.float64 else x.float()


class TextbookDot(ScoreAttention):
    """`q . k`, scaled by the family."""

    formula = "softmax_dot_product"
    capabilities = replace(SCORE)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return wide(query) @ wide(key).transpose(-1, -2)


class TextbookAdditive(ScoreAttention):
    """`v^T tanh(W_q q + W_k k)` [Bahdanau et al. 2014]."""

    formula = "additive"
    capabilities = replace(SCORE, query_dim=True)

    def __init__(self, *, hidden_size: int | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        hidden = self.head_dim if hidden_size is None else hidden_size
        self.options = {"hidden_size": hidden}
        self.tile_cost = hidden
        self.W_q = nn.Parameter(torch.randn(self.num_heads, hidden, self.head_dim) * self.head_dim**-0.5)
        self.W_k = nn.Parameter(torch.randn(self.num_heads, hidden, self.key_dim) * self.key_dim**-0.5)
        self.v = nn.Parameter(torch.randn(self.num_heads, hidden) * hidden**-0.5)

    def default_scale(self) -> float:
        return 1.0

    def project_query(self, query: Tensor) -> Tensor:
        return wide(query) @ wide(self.W_q).transpose(-1, -2)

    def project_key(self, key: Tensor) -> Tensor:
        return wide(key) @ wide(self.W_k).transpose(-1, -2)

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(wide(query)[:, :, :, None] + wide(key)[:, :, None])

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return torch.einsum("bhqka,ha->bhqk", self.hidden(query, key), wide(self.v))


class TextbookLuong(ScoreAttention):
    """Luong's general, concat and location scores [Luong et al. 2015, section 3.1]."""

    formula = "multiplicative"
    capabilities = replace(SCORE, query_dim=True)

    def __init__(
        self, *, score: str = "general", hidden_size: int | None = None, max_length: int = 512, **sizes: Any
    ) -> None:
        if score not in ("general", "concat", "location"):
            raise InvalidInput(f"{type(self).__name__}: score must be general, concat or location, got {score!r}")
        super().__init__(**sizes)
        heads, dq, dk = self.num_heads, self.head_dim, self.key_dim
        hidden = dq if hidden_size is None else hidden_size
        self.options: dict[str, Any] = {"score": score, "hidden_size": hidden, "max_length": max_length}
        shape = {"general": (dq, dk), "concat": (hidden, dq + dk), "location": (max_length, dq)}[score]
        self.W_a = nn.Parameter(torch.randn(heads, *shape) * dq**-0.5)
        if score == "concat":
            self.v_a = nn.Parameter(torch.randn(heads, hidden) * dq**-0.5)
            self.tile_cost = hidden
        if score == "location":
            why = "W_a scores positions of one length"
            self.narrow(cross_lengths=why, state=why, position_free=why)

    def default_scale(self) -> float:
        return 1.0

    def project_query(self, query: Tensor) -> Tensor:
        w, q = wide(self.W_a), wide(query)
        if self.options["score"] == "general":
            return q @ w
        return q @ w[..., : self.head_dim].transpose(-1, -2)  # concat's left part, location's whole

    def project_key(self, key: Tensor) -> Tensor:
        if self.options["score"] != "concat":
            return wide(key)
        return wide(key) @ wide(self.W_a)[..., self.head_dim :].transpose(-1, -2)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        score = self.options["score"]
        if score == "general":
            return wide(query) @ wide(key).transpose(-1, -2)
        if score == "concat":
            hidden = torch.tanh(wide(query)[:, :, :, None] + wide(key)[:, :, None])
            return torch.einsum("bhqka,ha->bhqk", hidden, wide(self.v_a))
        index = key_positions.clamp(min=0)  # padding on the left has positions below 0, and is hidden
        index = index[None] if index.dim() == 1 else index
        return query.gather(3, index[:, None, None, :].expand(*query.shape[:3], -1))


def score_definition(score: Any, default_scale: Any, reweight: Any = None) -> Any:
    """A definition from `score(query, key, parameters, positions)`, heads expanded; a factor on weights where given."""

    def definition(query: Tensor, key: Tensor, value: Tensor, *, visible: Tensor, **how: Any) -> dict[str, Tensor]:
        key, value = per_query_head(key, query.shape[1]), per_query_head(value, query.shape[1])
        query, key, value = without_absent(query, key, value, visible)
        s = score(query, key, how["parameters"], how["positions"])
        scale = default_scale(query, key) if how.get("scale") is None else how["scale"]
        names = ("softcap", "score_mod", "bias", "sinks", "positions")
        answer = softmax_attention(s, value, visible=visible, scale=scale, **{n: how.get(n) for n in names})
        if reweight is not None:
            answer["weights"] = answer["weights"] * reweight(query, how["parameters"], how["positions"])
            answer["out"] = answer["weights"] @ value
        return answer

    return staticmethod(definition)


def _cosine(query: Tensor, key: Tensor, parameters: Mapping[str, Tensor], positions: Any) -> Tensor:
    lengths = query.norm(dim=-1)[..., :, None] * key.norm(dim=-1)[..., None, :]
    alive = lengths > 0
    s = query @ key.transpose(-1, -2) / torch.where(alive, lengths, 1)
    return torch.where(alive, s, 0) * parameters["log_tau"].exp()[:, None, None]


class TextbookCosine(ScoreAttention):
    """`tau_h cos(q, k)`, with a learned temperature a head; a zero vector scores 0 [Henry et al. 2020, eq. 3]."""

    formula = "cosine"
    capabilities = replace(SCORE)
    definition = score_definition(_cosine, lambda q, k: 1.0)

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.log_tau = nn.Parameter(torch.linspace(0.5, 1.5, self.num_heads))

    def default_scale(self) -> float:
        return 1.0

    def normed(self, x: Tensor) -> Tensor:
        length = x.square().sum(-1, keepdim=True)
        return torch.where(length > 0, x * torch.where(length > 0, length, 1).rsqrt(), 0)

    def project_query(self, query: Tensor) -> Tensor:
        return self.normed(wide(query)) * wide(self.log_tau).exp()[:, None, None]

    def project_key(self, key: Tensor) -> Tensor:
        return self.normed(wide(key))

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return wide(query) @ wide(key).transpose(-1, -2)


def _distance(positions: Any) -> Tensor:
    query, key = positions
    result: Tensor = query[:, None, :, None] - key[:, None, None, :]
    return result


class TextbookRelative(ScoreAttention):
    """`q . k` plus a learned number for each clipped distance [Shaw et al. 2018, eq. 4 with scalars]; needs positions."""

    formula = "clipped_relative"
    reach = 4
    capabilities = replace(SCORE, position_free=False)
    definition = score_definition(
        lambda q, k, parameters, positions: (
            q @ k.transpose(-1, -2)
            + parameters["table"][:, (_distance(positions).clamp(-4, 4) + 4)[:, 0]].transpose(0, 1)
        ),
        lambda q, k: k.shape[-1] ** -0.5,
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.table = nn.Parameter(torch.randn(self.num_heads, 2 * self.reach + 1))

    def buckets(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        return distance.clamp(-self.reach, self.reach) + self.reach

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        leaning = wide(self.table)[:, self.buckets(query_positions, key_positions)]  # [H, (B,) tq, tk]
        return wide(query) @ wide(key).transpose(-1, -2) + (leaning if leaning.dim() == 3 else leaning.transpose(0, 1))


class TextbookLocal(TextbookDot):
    """Softmax weights times a Gaussian of the distance, not normalised again [Luong et al. 2015, eq. 10]."""

    formula = "local_gaussian"
    capabilities = replace(SCORE, position_free=False, normalised=False)
    definition = score_definition(
        lambda q, k, parameters, positions: q @ k.transpose(-1, -2),
        lambda q, k: k.shape[-1] ** -0.5,
        lambda q, parameters, positions: torch.exp(-(_distance(positions).to(q.dtype) ** 2) / 8),
    )

    def reweight(self, query: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        factor = torch.exp(-(wide(distance.to(query.dtype)) ** 2) / 8)
        return factor if factor.dim() == 2 else factor[:, None]


class TextbookConcat(TextbookLuong):
    def __init__(self, *, score: str = "concat", **sizes: Any) -> None:
        super().__init__(score=score, **sizes)


class TextbookLocation(TextbookLuong):
    def __init__(self, *, score: str = "location", **sizes: Any) -> None:
        super().__init__(score=score, **sizes)

    def supports(self, request: Request) -> list[Reason]:
        longest: int = self.options["max_length"]
        more = [Reason("key_length", f"{request.key_length} keys", f"up to {longest}")]
        return super().supports(request) + more * (request.key_length > longest)


def _by_head(numbers: Tensor) -> Tensor:
    return numbers[:, None, None]


class TextbookAlibi(TextbookDot):
    """`q . k - 2^(-8 (h + 1) / H) |distance|`, ALiBi for any number of heads [Press et al. 2022]; needs positions."""

    formula = "alibi"
    capabilities = replace(SCORE, position_free=False)
    definition = score_definition(
        lambda q, k, parameters, positions: (
            q @ k.transpose(-1, -2)
            - _by_head(2.0 ** (-8.0 * torch.arange(1, q.shape[1] + 1, dtype=q.dtype) / q.shape[1]))
            * _distance(positions).abs()
        ),
        lambda q, k: k.shape[-1] ** -0.5,
    )

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._slopes: dict[torch.device, Tensor] = {}  # outside the buffers, so that no cast of the module rounds them

    def slopes(self, device: torch.device) -> Tensor:
        if device not in self._slopes:
            with torch.inference_mode(False):  # a later call may record gradients
                heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=device)
                self._slopes[device] = torch.exp2(-8.0 * heads / self.num_heads)
        return self._slopes[device]

    def distance(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return (query_positions[..., :, None] - key_positions[..., None, :]).abs()

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        s = super().scores(query, key, query_positions=query_positions, key_positions=key_positions)
        distance = self.distance(query_positions, key_positions)
        distance = distance if distance.dim() == 2 else distance[:, None]
        return s - _by_head(self.slopes(s.device).to(s)) * distance


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speeds = 100.0 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.to(torch.float64)[..., None] * speeds  # [L, D/2] or [B, L, D/2]
    angles = angles if angles.dim() == 2 else angles[:, None]
    c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


class TextbookRotary(TextbookDot):
    """Rotary positions inside the score, halves paired [Su et al. 2021, eq. 34]; even widths; needs positions."""

    formula = "rotary"
    capabilities = replace(SCORE, position_free=False, head_dims=range(2, 513, 2))
    definition = score_definition(
        lambda q, k, parameters, positions: _turned(q, positions[0]) @ _turned(k, positions[1]).transpose(-1, -2),
        lambda q, k: k.shape[-1] ** -0.5,
    )

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return _turned(wide(x), positions)

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return self.turned(query, query_positions) @ self.turned(key, key_positions).transpose(-1, -2)


class TextbookDistance(TextbookDot):
    """`-|q - k|^2`, scaled like a product: the kernel of a Gaussian."""

    formula = "squared_distance"
    capabilities = replace(SCORE)
    definition = score_definition(
        lambda q, k, parameters, positions: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1),
        lambda q, k: k.shape[-1] ** -0.5,
    )

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return -(wide(query)[:, :, :, None] - wide(key)[:, :, None]).square().sum(-1)
