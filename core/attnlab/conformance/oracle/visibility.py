"""Visibility, decided one pair at a time with plain Python numbers.

This is "Visibility" of docs/contract.md written a second time, on purpose without `AttentionMask`: the mask must not be
its own oracle. It is slow (one call per pair) and meant for small inputs only.

Needs torch only to unpack tensors and to pack the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The visibility arguments of one call, as plain numbers; `Rules.of` unpacks tensors.

    Sizes: `batch`, `heads` (query heads), `queries`, `keys`. The rest carries the names and meanings of
    `Attention.forward`; `mask` is a nested list with four axes, each of full length or 1.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool = False
    offset: str | int | Sequence[int] | None = None
    window: tuple[int | None, int | None] | None = None
    key_mask: Sequence[Sequence[bool]] | None = None
    key_lengths: Sequence[int] | None = None
    query_lengths: Sequence[int] | None = None
    segments: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None = None
    mask: Any = None
    mask_mod: Callable[..., Any] | None = None

    @classmethod
    def of(cls, *, batch: int, heads: int, queries: int, keys: int, **arguments: Any) -> Rules:
        """From the caller's arguments; those that do not concern visibility are ignored."""
        known = {name: arguments[name] for name in cls.__dataclass_fields__ if arguments.get(name) is not None}
        mask = known.get("mask")
        if isinstance(mask, Tensor):
            known["mask"] = (mask[None, None] if mask.dim() == 2 else mask).tolist()
        for name in ("key_mask", "key_lengths", "query_lengths", "offset"):
            if isinstance(known.get(name), Tensor):
                known[name] = known[name].tolist()
        if "segments" in known:
            known["segments"] = tuple(_rows(ids.tolist(), batch) for ids in known["segments"])
        return cls(batch=batch, heads=heads, queries=queries, keys=keys, **known)


def _rows(rows: list[Any], batch: int) -> list[Any]:
    return rows * batch if len(rows) == 1 else rows


def may(b: int, h: int, i: int, j: int, rules: Rules) -> bool:
    """Whether query `i` of batch `b` and head `h` may see key `j`."""
    if not (query_present(b, i, rules) and key_present(b, j, rules)):
        return False
    return _may_at(b, h, i, j, query_positions(b, rules)[i], key_positions(b, rules)[j], rules)


def _may_at(b: int, h: int, i: int, j: int, q: int, k: int, rules: Rules) -> bool:
    """`may` for a query and a key that are present, at the positions `q` and `k`."""
    if rules.segments is not None and rules.segments[0][b][i] != rules.segments[1][b][j]:
        return False
    if rules.causal and k > q:
        return False
    if rules.window is not None:
        left, right = rules.window
        if left is not None and k < q - left:
            return False
        if right is not None and k > q + right:
            return False
    if rules.mask is not None:
        part = rules.mask
        for index in (b, h, i, j):
            part = part[index if len(part) > 1 else 0]
        if not part:
            return False
    return rules.mask_mod is None or bool(rules.mask_mod(b, h, q, k))


def key_present(b: int, j: int, rules: Rules) -> bool:
    """Whether key `j` of batch `b` is present (otherwise it is padding)."""
    if rules.key_mask is not None and not rules.key_mask[b][j]:
        return False
    if rules.key_lengths is not None and j >= rules.key_lengths[b]:
        return False
    return rules.segments is None or rules.segments[1][b][j] != -1


def query_present(b: int, i: int, rules: Rules) -> bool:
    """Whether query `i` of batch `b` is present (otherwise its row is zero)."""
    if rules.query_lengths is not None and i >= rules.query_lengths[b]:
        return False
    return rules.segments is None or rules.segments[0][b][i] != -1


def key_positions(b: int, rules: Rules) -> list[int]:
    """The position of each key: its index, counted from the start of its segment where there are segments."""
    return list(range(rules.keys)) if rules.segments is None else _ranks(rules.segments[1][b])


def query_positions(b: int, rules: Rules) -> list[int]:
    """The position of each query: its index (within its segment) plus the offset."""
    own = range(rules.queries) if rules.segments is None else _ranks(rules.segments[0][b])
    return [x + _offset(b, i, rules) for i, x in enumerate(own)]


def _ranks(ids: Sequence[int]) -> list[int]:
    """For each token how many earlier ones have its id."""
    counts: dict[int, int] = {}
    ranks = []
    for name in ids:
        ranks.append(counts.get(name, 0))
        counts[name] = ranks[-1] + 1
    return ranks


def _offset(b: int, i: int, rules: Rules) -> int:
    offset = rules.offset
    if offset is None:
        if rules.queries != rules.keys and (rules.causal or rules.window not in (None, (None, None))):
            raise ValueError("lengths differ: causal and window need an offset")
        return 0
    if offset == "top_left":
        return 0
    if offset == "bottom_right":
        if rules.segments is not None:
            query_ids, key_ids = rules.segments
            mine = query_ids[b][i]
            return list(key_ids[b]).count(mine) - list(query_ids[b]).count(mine)
        keys = rules.keys if rules.key_lengths is None else rules.key_lengths[b]
        queries = rules.queries if rules.query_lengths is None else rules.query_lengths[b]
        return keys - queries
    if isinstance(offset, int):
        return offset
    assert not isinstance(offset, str)
    return offset[b]


def dense(rules: Rules, rows: Sequence[int] | None = None) -> Tensor:
    """Every pair: bool `[B, H, Lq, Lk]`; or those of some query rows."""
    chosen = range(rules.queries) if rows is None else rows
    shape = (rules.batch, rules.heads, len(chosen), rules.keys)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool)
    heads = rules.heads if rules.mask_mod or (rules.mask and len(rules.mask[0]) > 1) else 1  # else all see the same
    pairs = []
    for b in range(rules.batch):
        places, own = key_positions(b, rules), query_positions(b, rules)
        keys = [(j, places[j]) if key_present(b, j, rules) else None for j in range(rules.keys)]
        queries = [(i, own[i]) if query_present(b, i, rules) else None for i in chosen]
        for h in range(heads):
            for query in queries:
                if query is None:
                    pairs.append([False] * rules.keys)
                    continue
                i, q = query
                pairs.append([key is not None and _may_at(b, h, i, key[0], q, key[1], rules) for key in keys])
    visible = torch.tensor(pairs, dtype=torch.bool).reshape(rules.batch, heads, len(chosen), rules.keys)
    return visible.expand(shape).contiguous()


def _padding_before(b: int, segment: int | None, rules: Rules) -> int:
    """How many keys of row `b` (of one of its segments) are padding before the first that is present; 0 where none is."""
    keys = range(rules.keys)
    if rules.segments is not None:
        keys = [j for j in keys if rules.segments[1][b][j] == segment]  # type: ignore[assignment]
    present = [key_present(b, j, rules) for j in keys]
    return present.index(True) if True in present else 0


def padding(rules: Rules) -> tuple[list[list[int]], list[list[int]]]:
    """How far padding on the left moves each query `[B, Lq]` and each key `[B, Lk]`."""
    sides = []
    for side, length in enumerate((rules.queries, rules.keys)):
        by_row = []
        for b in range(rules.batch):
            ids = [None] * length if rules.segments is None else rules.segments[side][b]
            before = {s: _padding_before(b, s, rules) for s in set(ids)}
            by_row.append([before[s] for s in ids])
        sides.append(by_row)
    return sides[0], sides[1]


def score_mod_of(
    rules: Rules, score_mod: Callable[..., Any] | None, rows: Sequence[int] | None = None
) -> Callable[..., Any] | None:
    """The caller's `score_mod` for a definition, whose `positions` start at the first present key: positions of the rules."""
    if score_mod is None:
        return None
    before_q, before_k = padding(rules)
    queries = range(rules.queries) if rows is None else rows
    q_moved = torch.tensor([[row[i] for i in queries] for row in before_q], dtype=torch.int64)
    k_moved = torch.tensor(before_k, dtype=torch.int64)

    def moved(score: Tensor, b: Any, h: Any, q: Tensor, k: Tensor) -> Any:
        return score_mod(
            score, b, h, q + q_moved.to(q.device)[:, None, :, None], k + k_moved.to(k.device)[:, None, None]
        )

    return moved


def positions(rules: Rules) -> tuple[Tensor, Tensor]:
    """Query positions `[B, Lq]` and key positions `[B, Lk]` as a formula reads them, int64: counted from the first present key."""
    before_q, before_k = padding(rules)
    q = [[x - p for x, p in zip(query_positions(b, rules), before_q[b], strict=True)] for b in range(rules.batch)]
    k = [[x - p for x, p in zip(key_positions(b, rules), before_k[b], strict=True)] for b in range(rules.batch)]
    return (
        torch.tensor(q, dtype=torch.int64).reshape(rules.batch, rules.queries),
        torch.tensor(k, dtype=torch.int64).reshape(rules.batch, rules.keys),
    )
