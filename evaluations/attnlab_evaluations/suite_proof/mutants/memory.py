"""Mutants that the checks in `checks/memory.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab import AttentionOutput, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention


class ClaimsLinearMemory(TextbookAttention):
    capabilities = replace(TextbookAttention.capabilities, linear_memory=True)


class BlocksAreNotRecomputed(TextbookAttention):
    """Blocks of queries bound the largest tensor; together, what they save for the backward is every pair."""

    capabilities = replace(TextbookAttention.capabilities, linear_memory=True)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        visible, rows = call.visibility, query.shape[2]
        if call.state or call.need_weights or call.need_lse or (visible is not None and not visible.only_causal):
            return super().attend(query, key, value, call)
        parts = []
        for q0 in range(0, rows, 50):
            q1 = min(q0 + 50, rows)
            tile = None if visible is None else visible.tile(q0, q1, 0, key.shape[2])
            part = Call(visibility=None, scale=call.scale, bias=None)
            s = self.scores(query[:, :, q0:q1], self.grouped(key), part) * self.scale(part)
            s = s if tile is None else s.masked_fill(~tile, -torch.inf)
            parts.append(torch.softmax(s, dim=-1) @ self.grouped(value))
        return AttentionOutput(torch.cat(parts, dim=2).to(query.dtype))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(ClaimsLinearMemory, "linear_memory_of_intermediates", "all pairs at once"),
    Mutant(BlocksAreNotRecomputed, "linear_memory_saved_for_backward", "blocks save all their pairs"),
)
