"""A stranger's variant in each family: ten lines of its own, and every mode works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnlab import (
    Attention,
    AttentionOutput,
    Call,
    Capabilities,
    FeatureMapAttention,
    GateSpec,
    PluginError,
    RecurrentAttention,
    ScoreAttention,
)

B, H, HKV, L, D = 2, 4, 2, 6, 3
# float64, at most 6 terms of order 1 in another order.
CLOSE = {"atol": 1e-12, "rtol": 1e-11}


class Cosine(ScoreAttention):
    """Softmax of ten times the cosine of query and key."""

    formula = "cosine"

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return 10 * normalize(query, dim=-1) @ normalize(key, dim=-1).transpose(-1, -2)

    def default_scale(self) -> float:
        return 1.0


class Square(FeatureMapAttention):
    """The kernel of squared features."""

    formula = "square"

    def feature_map(self, x: Tensor, *, role: Any, positions: Tensor) -> Tensor:
        return x.square()


class Fading(RecurrentAttention):
    """A sum of outer products that halves with every token."""

    formula = "fading"

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * memory + key[..., :, None] * value[..., None, :]


class Gated(RecurrentAttention):
    """The same with a learned decay for each token."""

    formula = "gated"
    gates: ClassVar = {"log_decay": GateSpec("[B,Hkv,Lk]", range="<=0")}
    capabilities = replace(RecurrentAttention.capabilities, gates=True)

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        kept = torch.exp(gates["log_decay"])[..., None, None] * memory
        return kept + key[..., :, None] * value[..., None, :]


class Copy(Attention):
    """Each query gets the mean of the values that it sees: a plain variant, with its own mask."""

    formula = "copy"
    capabilities = Capabilities(
        causal=True, key_mask=True, gqa=True, cross_lengths=True, backward=True,
        dtypes=frozenset({"float64"}), devices=frozenset({"cpu"}),
    )  # fmt: skip

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        sees = torch.ones(shape) if call.visibility is None else call.visibility.dense().expand(shape)
        weights = sees.to(value.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        return AttentionOutput(weights @ value.repeat_interleave(shape[1] // value.shape[1], 1))


STRANGERS = (Cosine, Square, Fading, Gated, Copy)


def by_loop(kind: type[Attention], x: dict[str, Tensor], sees: Tensor) -> Tensor:
    """The stranger's formula, one query after the other; `sees [B, L, L]`. Recurrences read `sees` as presence."""
    out = torch.zeros(B, H, L, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            q, k, v = x["q"][b, h], x["k"][b, h // 2], x["v"][b, h // 2]
            for i in range(L):
                keys = sees[b, i].nonzero()[:, 0]
                if kind in (Fading, Gated):
                    memory = torch.zeros(D, D, dtype=torch.float64)
                    for j in keys:
                        decay = 0.5 if kind is Fading else torch.exp(x["log_decay"][b, h // 2, j])
                        memory = decay * memory + torch.outer(k[j], v[j])
                    out[b, h, i] = D**-0.5 * q[i] @ memory
                    continue
                if not len(keys):
                    continue
                if kind is Cosine:
                    cosines = torch.cosine_similarity(q[i][None], k[keys], dim=1)
                    weights = torch.softmax(10 * cosines, 0)
                elif kind is Square:
                    kernel = (q[i].square() * k[keys].square()).sum(1)
                    weights = kernel / kernel.sum()
                else:
                    weights = torch.ones(len(keys), dtype=torch.float64) / len(keys)
                out[b, h, i] = weights @ v[keys]
    return out


def inputs() -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, H, L, D, dtype=torch.float64),
        "k": torch.randn(B, HKV, L, D, dtype=torch.float64),
        "v": torch.randn(B, HKV, L, D, dtype=torch.float64),
        "log_decay": -torch.rand(B, HKV, L, dtype=torch.float64),
    }


def called(variant: Attention, x: dict[str, Tensor], part: slice = slice(None), **more: Any) -> Any:
    if variant.gates:
        more["gates"] = {"log_decay": x["log_decay"][:, :, part]}
    return variant(x["q"][:, :, part], x["k"][:, :, part], x["v"][:, :, part], **more)


PADDING = torch.tensor([[False, True, True, False, True, True], [True, True, True, True, False, False]])


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["plain", "causal"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_variant_is_its_formula(kind: type[Attention], causal: bool, padded: bool) -> None:
    x = inputs()
    sees = torch.ones(B, L, L, dtype=torch.bool)
    sees = sees.tril() if causal else sees
    more = {}
    if padded:
        sees, more = sees & PADDING[:, None], {"key_mask": PADDING}
        for name in ("k", "v"):
            x[name][(~PADDING)[:, None].expand(B, HKV, L)] = torch.nan
    variant = kind(num_heads=H, num_kv_heads=HKV, head_dim=D)
    out = called(variant, x, causal=causal, **more).out
    torch.testing.assert_close(out, by_loop(kind, x, sees), **CLOSE)


@pytest.mark.parametrize("kind", [Cosine, Square, Fading, Gated])
def test_a_strangers_variant_decodes_token_by_token_with_padding(kind: type[Attention]) -> None:
    x, variant = inputs(), kind(num_heads=H, num_kv_heads=HKV, head_dim=D)
    whole = called(variant, x, causal=True, key_mask=PADDING).out
    state, outs = variant.init_state(B, dtype=torch.float64), []
    for t in range(L):
        part = slice(t, t + 1)
        result = called(variant, x, part, causal=True, key_mask=PADDING[:, part], state=state)
        state = result.state
        outs.append(result.out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, **CLOSE)


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_variant_has_gradients_that_match_finite_differences(kind: type[Attention]) -> None:
    variant = kind(num_heads=2, num_kv_heads=1, head_dim=2)
    q, k, v = (torch.randn(1, h, 4, 2, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))
    more: dict[str, Any] = {"gates": {"log_decay": torch.zeros(1, 1, 4)}} if variant.gates else {}
    mask = torch.tensor([[False, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda *x: variant(*x, causal=True, key_mask=mask, **more).out, (q, k, v), fast_mode=True
    )


@pytest.mark.parametrize("kind", [Cosine, Square, Fading, Gated, Copy])
@pytest.mark.parametrize("offset", [-2, 2, torch.tensor([-1, 3])], ids=["before", "after", "each"])
def test_a_strangers_variant_honours_offsets(kind: type[Attention], offset: Any) -> None:
    x, variant = inputs(), kind(num_heads=H, num_kv_heads=HKV, head_dim=D)
    shift = torch.as_tensor(offset).expand(B)
    sees = torch.arange(L) <= torch.arange(L)[:, None] + shift[:, None, None]
    out = called(variant, x, causal=True, offset=offset).out
    torch.testing.assert_close(out, by_loop(kind, x, sees), **CLOSE)


def test_a_score_with_linear_layers_of_its_own_works_under_autocast() -> None:
    class Learned(ScoreAttention):
        inner_product = True

        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.turn = torch.nn.Linear(self.head_dim, self.key_dim)

        def project_query(self, query: Tensor) -> Tensor:
            return self.turn(query)

    variant, x = Learned(num_heads=2, head_dim=D), torch.randn(1, 2, L, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = variant(x, x, x, need_lse=True).out
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), variant(x, x, x).out, atol=0.05, rtol=0)


def test_a_feature_map_with_a_linear_layer_works_under_autocast_and_sums_in_float32() -> None:
    class Learned(FeatureMapAttention):
        def __init__(self, **sizes: Any) -> None:
            super().__init__(**sizes)
            self.turn = torch.nn.Linear(self.head_dim, 8)

        def feature_map(self, x: Tensor, *, role: Any, positions: Tensor) -> Tensor:
            return torch.exp(self.turn(x))

    variant, x = Learned(num_heads=2, head_dim=D), torch.randn(1, 2, 300, D).bfloat16()
    assert variant.num_features() == 8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = variant(x.float(), x.float(), x.float(), causal=True).out
    assert torch.equal(inside, variant(x, x, x, causal=True).out)


def test_score_mod_and_mask_mod_speak_of_positions_not_of_indices() -> None:
    x = inputs()
    variant = Cosine(num_heads=H, num_kv_heads=HKV, head_dim=D)
    told: list[tuple[list[int], list[int]]] = []

    def keep(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        told.append((q.flatten().tolist(), k.flatten().tolist()))
        return q >= k

    called(variant, x, offset=3, mask_mod=keep)
    assert told == [([3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5])]


@pytest.mark.parametrize(
    ("base", "method"),
    [(ScoreAttention, "scores"), (FeatureMapAttention, "feature_map"), (RecurrentAttention, "update")],
)
def test_a_class_that_writes_nothing_names_the_method_to_write(base: type[Attention], method: str) -> None:
    variant = type("Idle", (base,), {})(num_heads=1, head_dim=2)
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(PluginError, match=f"Idle writes no {method}"):
        variant(x, x, x)


def test_a_plain_class_without_attend_is_a_plugin_error() -> None:
    capabilities = Capabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))
    variant = type("Idle", (Attention,), {"capabilities": capabilities})(num_heads=1, head_dim=2)
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(PluginError, match="Idle writes no attend"):
        variant(x, x, x)
