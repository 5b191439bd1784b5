"""The delta rule: a fast-weight memory that corrects what it would have answered [Schlag et al. 2021]. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from attnlab import GateSpec, RecurrentAttention


class DeltaRuleAttention(RecurrentAttention):
    """`S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T`, `o_i = scale q_i^T S`, Schlag et al. 2021, "Linear Transformers Are
    Secretly Fast Weight Programmers", eq. 24, without their normalisations of q and k.

    Gate `beta [B, Hkv, Lk]` in (0, 1) is the writing strength: 1 with keys of unit length replaces what the key held, 0 writes
    nothing. Each query reads after the token at its position, without `causal` after the last. Token by token. Parameter-free.
    """

    name = "delta_rule"
    formula = "delta_rule"
    gates = MappingProxyType({"beta": GateSpec("[B,Hkv,Lk]", range="(0,1)")})
    capabilities = replace(RecurrentAttention.capabilities, gates=True, exports=True)

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        answer = (key[..., None, :] @ memory)[..., 0, :]  # [B, Hkv, Dv]: what the memory holds for this key
        correction = gates["beta"][..., None] * (value - answer)
        return memory + key[..., :, None] * correction[..., None, :]
