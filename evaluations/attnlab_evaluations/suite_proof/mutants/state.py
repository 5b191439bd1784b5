"""Mutants that the checks in `checks/state.py` must fail. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from attnlab import CacheState, Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.mutants._stores import StoredAttention, kept_in


@dataclass(kw_only=True, eq=False)
class _AlwaysInPlace(CacheState):
    def append(
        self, key: Tensor, value: Tensor, *, recording: bool, present: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor, CacheState]:
        start, stop = self.length, self.length + key.shape[2]
        self.key[:, :, start:stop], self.value[:, :, start:stop] = key, value
        kept = replace(self, length=stop, spent=False, key_present=present, key_segments=segments)
        return self.key[:, :, :stop], self.value[:, :, :stop], kept


@kept_in(_AlwaysInPlace)
class WritesUnderTheGraph(StoredAttention):
    """A static store is written in place although a graph holds what it held before."""

    def grouped(self, x: Tensor) -> Tensor:
        return x if self.num_heads == self.num_kv_heads else super().grouped(x)

    def init_state(self, batch: int, capacity: int | None = None, *args: Any, **kwargs: Any) -> CacheState:
        return super().init_state(batch, 64 if capacity is None else capacity, *args, **kwargs)


class WritesUnderTheQuerysGraph(StoredAttention):
    """Only a graph of the keys keeps a store from being written: one of the query alone holds it as well."""

    def grouped(self, x: Tensor) -> Tensor:
        return x if self.num_heads == self.num_kv_heads else super().grouped(x)

    def recording(self, call: Call) -> bool:
        return False


MUTANTS: tuple[Mutant, ...] = (
    Mutant(WritesUnderTheGraph, "steps_with_and_without_autograd_mix", "a store is written under a graph"),
    Mutant(
        WritesUnderTheQuerysGraph, "steps_with_and_without_autograd_mix", "a store is written under a query's graph"
    ),
)
