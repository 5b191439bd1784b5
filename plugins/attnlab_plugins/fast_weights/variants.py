"""The formulas, by attnlab's own products of matrices and kernels. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from attnlab import GateSpec, InvalidInput, RecurrentAttention
from attnlab.engines import accumulation_dtype, chunked_recurrence, holds

# Below this many tokens at once, as in decoding, one after the other is quicker.
_FEW = 4
_BETA = GateSpec("[B,Hkv,Lk]", range="(0,1)")
_DECAY = {"head": GateSpec("[B,Hkv,Lk]", range="<=0"), "channel": GateSpec("[B,Hkv,Lk,Dk]", range="<=0")}


class FastWeightsAttention(RecurrentAttention):
    """`S_t = S_{t-1} + k_t v_t^T`, `o_i = scale q_i^T S`: outer products added up, Schmidhuber 1992, "Learning to Control Fast-Weight
    Memories"; linear attention without a feature map or a normaliser, `rule="linear"` of ONNX LinearAttention-27.

    Each query reads after the token at its position, without `causal` after the last. Many tokens go chunk by chunk in products of
    matrices, few one by one. Parameter-free.
    """

    name = "fast_weights"
    formula = "fast_weights"
    capabilities = replace(RecurrentAttention.capabilities, compiles=True, exports=True)
    corrects = False

    def log_decay(self, gates: Mapping[str, Tensor], key: Tensor) -> Tensor | None:
        """`[B, Hkv, ...]` or `[B, Hkv, ..., Dk]` for `key [B, Hkv, ..., Dk]`; None where nothing fades."""
        return gates.get("log_decay")

    def without_absent(
        self, key: Tensor, value: Tensor, gates: Mapping[str, Tensor], present: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """`(key, value, beta, log_decay)` of `scan`'s tokens, where a padded one writes nothing and nothing fades at it."""
        beta, decay = gates.get("beta"), self.log_decay(gates, key)
        if present is not None:
            gone = ~present[:, None, :]
            key, value = (x.masked_fill(gone[..., None], 0) for x in (key, value))
            if decay is not None:
                decay = decay.masked_fill(gone if decay.dim() == 3 else gone[..., None], 0)
        return key, value, beta, decay

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        decay = self.log_decay(gates, key)
        if decay is not None:
            memory = memory * torch.exp(decay[..., None, None] if decay.dim() == 2 else decay[..., None])
        if self.corrects:  # by what the memory holds for this key
            value = value - (key[..., None, :] @ memory)[..., 0, :]
        if "beta" in gates:
            value = value * gates["beta"][..., None]
        return memory + key[..., :, None] * value[..., None, :]

    def scan(
        self,
        memory: Tensor,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        gates: Mapping[str, Tensor],
        present: Tensor | None,
        *,
        recording: bool,
    ) -> tuple[Tensor | None, Tensor]:
        if holds(key.shape[2] < _FEW):
            return super().scan(memory, query, key, value, gates, present, recording=recording)
        key, value, beta, decay = self.without_absent(key, value, gates, present)
        return chunked_recurrence(
            memory, query, key, value, beta=beta, log_decay=decay, corrects=self.corrects, recording=recording
        )


class DeltaRuleAttention(FastWeightsAttention):
    """`S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`, `o_i = scale q_i^T S`, Schlag et al. 2021, "Linear Transformers Are
    Secretly Fast Weight Programmers", eq. 24, without their normalisations of q and k.

    Gate `beta [B, Hkv, Lk]` in (0, 1) is the writing strength: 1 with keys of unit length replaces what the key held, 0 writes
    nothing. Keys longer than `sqrt(2 / beta)` make the memory grow without bound, and close to that length a digit is lost in
    float32; `MultiHeadAttention` gives keys and queries unit length. Reads and chunks as `fast_weights`. Parameter-free.
    """

    name = "delta_rule"
    formula = "delta_rule"
    gates = MappingProxyType({"beta": _BETA})
    capabilities = replace(FastWeightsAttention.capabilities, gates=True)
    corrects = True
    qk_l2norm = True


class _Fading(FastWeightsAttention):
    """What `gated` and `gated_delta` share: the option `decay`, one of `decays`, by default the first."""

    capabilities = replace(FastWeightsAttention.capabilities, gates=True)
    decays: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        decay: str | None = None,
    ) -> None:
        decay = self.decays[0] if decay is None else decay
        if decay not in self.decays:
            raise InvalidInput(f"{self.name}: decay must be one of {', '.join(self.decays)}, got {decay!r}")
        self.gates = {name: spec for name, spec in type(self).gates.items() if name != "log_decay"}  # type: ignore[misc]
        if decay in _DECAY:
            self.gates["log_decay"] = _DECAY[decay]
        super().__init__(
            num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value_dim
        )
        self.options = {"decay": decay}
        if decay == "retention":
            self.narrow(
                gates="under retention each head fades at a rate of its own, which no token changes",
                gqa="under retention each query head has a rate of its own, so that heads cannot share a memory",
            )


class GatedAttention(_Fading):
    """`S_t = e^{g_t} S_{t-1} + k_t v_t^T`, `o_i = scale q_i^T S`, Yang et al. 2024, "Gated Linear Attention Transformers with
    Hardware-Efficient Training", eq. 3.

    `decay` says what g is (default channel):

    - `"channel"`: gate `log_decay [B, Hkv, Lk, Dk]`, 0 or less, one of each channel of the key (`[B, Hkv, Lk]` serves as well).
    - `"head"`: gate `log_decay [B, Hkv, Lk]`, one of each head, as in Mamba-2 and mLSTM.
    - `"retention"`: no gate; `log(1 - 2^(-5 - h))` of head h, Sun et al. 2023, "Retentive Network", eq. 8, without their
      rotation of q and k and their norm of the output.

    Reads and chunks as `fast_weights`. Parameter-free.
    """

    name = "gated"
    formula = "gated"
    gates = MappingProxyType({"log_decay": _DECAY["channel"]})
    decays = ("channel", "head", "retention")
    check_options = ({"decay": "head"}, {"decay": "retention"})

    def log_decay(self, gates: Mapping[str, Tensor], key: Tensor) -> Tensor | None:
        if self.options["decay"] != "retention":
            return super().log_decay(gates, key)
        heads = torch.arange(self.num_kv_heads, device=key.device, dtype=accumulation_dtype(key.dtype))
        rates = torch.log1p(-(2.0 ** (-5 - heads)))
        return rates.view(-1, *[1] * (key.dim() - 3)).expand(key.shape[:-1])


class GatedDeltaAttention(_Fading):
    """`S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T`, `o_i = scale q_i^T S`, Yang et al. 2024, "Gated Delta
    Networks: Improving Mamba2 with Delta Rule", eq. 10: the memory fades, then corrects what it would have answered.

    Gates `beta` as in `delta_rule`, and `log_decay`, 0 or less: with `decay="head"` (theirs) `[B, Hkv, Lk]`, with `"channel"` one of
    each channel of the key, `[B, Hkv, Lk, Dk]` (Kimi Team 2025, "Kimi Linear"). Reads and chunks as `fast_weights`.
    Parameter-free.
    """

    name = "gated_delta"
    formula = "gated_delta"
    gates = MappingProxyType({"beta": _BETA, "log_decay": _DECAY["head"]})
    corrects = True
    qk_l2norm = True
    decays = ("head", "channel")
    check_options = ({"decay": "channel"},)
