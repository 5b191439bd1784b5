"""RecurrentAttention: write `update` and `read`, get scan, splits and decoding. Needs torch; plugins derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from attnlab.call import AttentionOutput, Call
from attnlab.capabilities import DTYPES, Capabilities
from attnlab.engines.heads import accumulation_dtype, fold_groups, in_own_precision
from attnlab.engines.scan import scan_recurrence
from attnlab.errors import InvalidInput, PluginError
from attnlab.families._relative import relative_offset
from attnlab.interface import Attention
from attnlab.state.states import RecurrentState, State, check_room

RECURRENT_CAPABILITIES = Capabilities(
    causal=True,
    key_mask=True,
    scale=True,
    cross_lengths=True,
    gqa=True,
    value_dim=True,
    state=True,
    backward=True,
    dtypes=frozenset(DTYPES),
    devices=frozenset({"cpu", "cuda"}),
    exact=True,
    deterministic=True,
    linear_memory=True,
)
"""What the family serves for any recurrence; add `gates` where `gates` are declared."""


class RecurrentAttention(Attention):
    """A memory `S [B, Hkv, Dk, Dv]` that each token updates and each query reads.

    Write `update` and `read`; override `scan` for a chunked form. Query i reads after the token at its position; without
    `causal` every query reads after the last. Padded tokens leave the memory as it was. Memory is float32 or better.
    """

    family: ClassVar[str] = "recurrent"
    to_write: ClassVar[tuple[str, ...]] = ("update", "scan", "attend")
    capabilities: Capabilities = RECURRENT_CAPABILITIES
    state_type: ClassVar[type[State]] = RecurrentState

    def update(self, memory: Tensor, key: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """The memory `[B, Hkv, Dk, Dv]` after one token `key [B, Hkv, Dk]`, `value [B, Hkv, Dv]`, gates `[B, Hkv]` (or `, Dk`)."""
        raise PluginError(f"{type(self).__name__} writes no update(memory, key, value, gates)")

    def read(self, memory: Tensor, query: Tensor) -> Tensor:
        """`[B, Hkv, G, n, Dv]` from `query [B, Hkv, G, n, Dq]`, before scale; by default `q^T S`."""
        return query.to(memory.dtype) @ memory[:, :, None]

    def token_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What `scan` gets query, key and value in, of inputs of `dtype`: that of sums, unless kernels of `scan` take a narrower one."""
        return accumulation_dtype(dtype)

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
        """`(out [B, Hkv, G, n, Dv], memory)`: n tokens in order, each followed by the reading of its query `[B, Hkv, G, n, Dq]`.

        query None reads nothing; present bool `[B, n]`: a padded token leaves the memory as it was. Token by token with `update` and
        `read`; override it for a form that takes many at once. recording: whether autograd records.
        """
        outs, memory = scan_recurrence(
            memory, query, key, value, gates, present, self.update, self.read, recording=recording
        )
        return (torch.cat(outs, 3) if outs else None), memory

    @in_own_precision
    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        wide, own = accumulation_dtype(query.dtype), self.token_dtype(query.dtype)
        k, v = key.to(own), value.to(own)
        q = fold_groups(query.to(own), self.num_kv_heads)  # [B, Hkv, G, Lq, Dq]
        gates = {n: g.to(wide) for n, g in (call.gates or {}).items()}
        visible, state, new = call.visibility, call.state, key.shape[2]
        assert state is None or isinstance(state, RecurrentState)
        memory = (
            k.new_zeros(k.shape[0], self.num_kv_heads, self.key_dim, self.value_dim, dtype=wide)
            if state is None
            else state.memory
        )
        present = (
            None
            if visible is None or visible.key_present is None
            else visible.key_present[:, visible.key_length - new :]
        )

        def run(memory: Tensor, start: int, stop: int, query: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
            return self.scan(
                memory,
                query,
                k[:, :, start:stop],  # a slice object would tie a graph to the length
                v[:, :, start:stop],
                {n: g[:, :, start:stop] for n, g in gates.items()},
                None if present is None else present[:, start:stop],
                recording=call.recording,
            )

        if visible is None or visible.right is None:
            _, memory = run(memory, 0, new)
            out = self.read(memory, q)
        else:
            offset = relative_offset(self.name, visible.offset, state)
            if isinstance(offset, Tensor):
                out = self._read_at(memory, q, k, v, gates, present, offset, call.recording)
                if state is not None:
                    _, memory = run(memory, 0, new)
            else:
                lq = q.shape[3]
                early = min(max(-offset, 0), lq)  # queries that stand before the first new token
                first = min(max(offset, 0), new)
                last = min(max(offset + lq, 0), new)
                if first:
                    _, memory = run(memory, 0, first)
                pieces = [self.read(memory, q[:, :, :, :early])] if early else []
                late = early + last - first
                if late > early:
                    paired, memory = run(memory, first, last, q[:, :, :, early:late])
                    assert paired is not None
                    pieces.append(paired)
                if late < lq or not pieces:
                    pieces.append(self.read(memory, q[:, :, :, late:]))
                if state is not None and last < new:
                    _, memory = run(memory, last, new)
                out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 3)
        scale = self.default_scale() if call.scale is None else float(call.scale)
        out = out.flatten(1, 2) if scale is None else out.flatten(1, 2) * scale
        following = None if state is None else RecurrentState(length=state.length + new, memory=memory)
        return AttentionOutput(out.to(query.dtype), state=following)

    def _read_at(
        self,
        memory: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        present: Tensor | None,
        offset: Tensor,
        recording: bool,
    ) -> Tensor:
        """Offsets `[B]` that differ: keys before a row's first query go first, then one key a query, moved to meet it."""
        lk, lq = k.shape[2], q.shape[3]
        places = torch.arange(lk, device=k.device)
        here = torch.ones(k.shape[0], lk, dtype=torch.bool, device=k.device) if present is None else present
        _, memory = self.scan(memory, None, k, v, gates, here & (places < offset[:, None]), recording=recording)
        source = torch.arange(lq, device=k.device) + offset[:, None]  # [B, Lq]
        inside = (source >= 0) & (source < lk)
        index = source.clamp(0, max(lk - 1, 0))
        moved = {n: _gathered(g, index) for n, g in gates.items()}
        there = inside & here.gather(1, index)
        out, _ = self.scan(memory, q, _gathered(k, index), _gathered(v, index), moved, there, recording=recording)
        assert out is not None
        return out

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        initial: Tensor | None = None,
    ) -> RecurrentState:
        """A memory that holds nothing, or a copy of `initial [B, Hkv, Dk, Dv]`, through which gradients flow.

        In float32 or better, constant in size, so that `capacity` asks for nothing. device and dtype default to those of `initial`.
        """
        check_room(batch, capacity)
        shape = (batch, self.num_kv_heads, self.key_dim, self.value_dim)
        if initial is None:
            wide = accumulation_dtype(dtype or torch.get_default_dtype())
            return RecurrentState(memory=torch.zeros(shape, device=device, dtype=wide))
        if not isinstance(initial, Tensor) or not initial.is_floating_point() or initial.shape != shape:
            got = f"{initial.dtype} {list(initial.shape)}" if isinstance(initial, Tensor) else type(initial).__name__
            raise InvalidInput(
                f"{self.name}: init_state: initial must be a float tensor [B, Hkv, Dk, Dv] = {list(shape)}, got {got}"
            )
        wide = accumulation_dtype(dtype or initial.dtype)
        return RecurrentState(memory=initial.to(device=device, dtype=wide, copy=True))

    def absorb(self, key: Tensor, value: Tensor, call: Call) -> State:
        assert isinstance(call.state, RecurrentState)
        query = key.new_zeros(key.shape[0], self.num_heads, 0, self.head_dim)
        whole = Call(gates=call.gates, state=call.state, recording=call.recording, visibility=call.visibility)
        result = self.attend(query, key, value, whole)
        assert result.state is not None
        return result.state


def _gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """`tensor [B, Hkv, L, ...]` at `index [B, n]` of its length axis."""
    shape = (index.shape[0], 1, index.shape[1], *[1] * (tensor.dim() - 3))
    return tensor.gather(2, index.view(shape).expand(-1, tensor.shape[1], -1, *tensor.shape[3:]))
