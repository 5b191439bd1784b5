"""Parts of a visibility: slices of positions, ranks in segments, what joins past and new, shapes judged. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlab.errors import InvalidInput, PluginError

if TYPE_CHECKING:
    from attnlab.visibility.resolved import Visibility


Rule = Callable[..., Any]


def rows(positions: Tensor, start: int, stop: int) -> Tensor:
    """`[1, 1, n]` or `[B, 1, n]` of positions `[L]` or `[B, L]`."""
    part = positions[..., start:stop]
    return part[None, None] if part.dim() == 1 else part[:, None]


def slice_axis(tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, start, stop - start)


def without_columns(tensor: Tensor, start: int, stop: int, front: Tensor | None = None) -> Tensor:
    """The last axis, keys, without those from `start` to `stop`; one column that stands for all stays.

    front `[B, start]`: the keys whose columns come first, where these are not the first `start`.
    """
    if tensor.shape[-1] == 1:
        return tensor
    if not start:
        return tensor[..., stop:]
    if front is None:
        return torch.cat([tensor[..., :start], tensor[..., stop:]], -1)
    rest = tensor[..., stop:]
    first = columns_at(tensor, front)
    return torch.cat([first, rest.expand(*first.shape[:-1], rest.shape[-1])], -1)


def columns_at(tensor: Tensor, index: Tensor) -> Tensor:
    """Of `tensor [B | 1, ..., Lk]` the columns `index [B, n]`, another choice for each row; past the end, the last one."""
    index = index.clamp(max=tensor.shape[-1] - 1)
    index = index.view(index.shape[0], *(1,) * (tensor.dim() - 2), index.shape[1])
    shape = (index.shape[0], *tensor.shape[1:-1])
    return tensor.expand(*shape, -1).gather(-1, index.expand(*shape, -1))


def moved_back(function: Callable[..., Any], start: int, gone: int, front: Tensor | None = None) -> Callable[..., Any]:
    """A `mask_mod` or `score_mod` of positions, for positions where `gone` keys from `start` on were taken out.

    front `[B, start]`: the keys that come first, where these are not the first `start`.
    """

    def moved(*parts: Any) -> Any:
        *others, b, h, q, k = parts
        first = k if front is None else front[b, k.clamp(max=start - 1)]
        return function(*others, b, h, q + gone, torch.where(k < start, first, k + gone))

    return moved


def also(given: Rule | None, rule: Rule) -> Rule:
    """Both rules at once."""
    if given is None:
        return rule
    return lambda b, h, q, k: given(b, h, q, k) & rule(b, h, q, k)


def within_left(left: int, sink_tokens: int) -> Rule:
    return lambda b, h, q, k: (k >= q - left) | (k < sink_tokens)


def joined(bounds: list[tuple[int, int]]) -> tuple[int, int, int | None]:
    """`(left, sink_tokens, strict_left)` of left bounds `(left, sink_tokens)`, at most one of which exempts sink tokens."""
    strict: int | None = None
    exempt = [bound for bound in bounds if bound[1]]
    for left, sinks in bounds:  # a loop: torch.compile cannot trace min(..., default=)
        if not sinks:
            strict = left if strict is None else min(strict, left)
    if len(exempt) > 1:
        raise PluginError(
            f"two windows with sink tokens do not combine: got {exempt[0]} and {exempt[1]} (left, sink_tokens)"
        )
    if not exempt or (strict is not None and strict <= exempt[0][0]):
        assert strict is not None
        return strict, 0, None
    return *exempt[0], strict


def broadcast_rows(ids: Tensor, batch: int) -> Tensor:
    return ids.expand(batch, -1) if ids.shape[0] == 1 else ids


def past_ids(past_segments: Tensor | None, batch: int, past: int, device: torch.device) -> Tensor:
    if past_segments is not None:
        return past_segments
    raise InvalidInput("segments: the state holds tokens without segments; start a new state for packed input")


def with_past(
    new: Tensor | None, past_present: Tensor | None, batch: int, past: int, new_length: int, device: torch.device
) -> Tensor | None:
    if not past or (new is None and past_present is None):
        return new if not past else None
    old = past_present if past_present is not None else torch.ones(batch, past, dtype=torch.bool, device=device)
    fresh = new if new is not None else torch.ones(batch, new_length, dtype=torch.bool, device=device)
    return torch.cat([old, fresh], 1)


def ranks(ids: Tensor) -> Tensor:
    """For each token the number of earlier tokens of its row with the same id; `[B, L]`, `O(L log L)`."""
    order = torch.argsort(ids, dim=1, stable=True)
    ordered = ids.gather(1, order)
    first = torch.searchsorted(ordered.contiguous(), ordered.contiguous())  # start of each run of equal ids
    rank = torch.arange(ids.shape[1], device=ids.device) - first
    return torch.empty_like(rank).scatter_(1, order, rank)


def count_of(pool: Tensor, ids: Tensor) -> Tensor:
    """How many of `pool [B, n]` equal each of `ids [B, L]`; `[B, L]`."""
    ordered = pool.sort(dim=1).values.contiguous()
    wanted = ids.contiguous()
    return torch.searchsorted(ordered, wanted, right=True) - torch.searchsorted(ordered, wanted)


def check_shape(
    subject: str, name: str, tensor: Tensor, shape: tuple[int, ...], words: str, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidInput(f"{subject}: {name} must be {words} = {list(shape)}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise InvalidInput(
            f"{subject}: {name} is on {tensor.device} and query on {device}; move it with .to(query.device)"
        )


def checked_allowed(mask: Tensor | None, v: Visibility, subject: str, stateful: bool) -> Tensor | None:
    """The bool mask with four axes, after its shape and device were judged."""
    if mask is None:
        return None
    full = [v.batch, v.num_heads, v.query_length, v.key_length]
    got = list(mask.shape)
    if mask.dim() == 3:
        a, q, k = got
        raise InvalidInput(
            f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}; if its first axis is the batch add a "
            f"head axis (mask[:, None], [{a}, 1, {q}, {k}]), if it is the heads add a batch axis (mask[None], [1, {a}, {q}, {k}])"
        )
    if mask.dim() == 1:
        raise InvalidInput(
            f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}; if it marks keys pass key_mask= ([B, Lk]), "
            "if it marks queries pass mask=mask[None, None, :, None]"
        )
    if mask.dim() not in (2, 4):
        raise InvalidInput(f"{subject}: mask must be [Lq, Lk] or broadcast to {full}, got {got}")
    four = mask[None, None] if mask.dim() == 2 else mask
    fits = all(have in (1, want) for have, want in zip(four.shape, full, strict=True))
    if mask.dim() == 2 and got != full[2:]:
        fits = False
    if not fits:
        extra = "; with a state the mask spans past and new keys" if stateful else ""
        raise InvalidInput(f"{subject}: mask must be [Lq, Lk] = {full[2:]} or broadcast to {full}, got {got}{extra}")
    if mask.device != v.device:
        raise InvalidInput(
            f"{subject}: mask is on {mask.device} and query on {v.device}; move it with .to(query.device)"
        )
    return four


def checked_mod(seen: Any, full: list[int], device: torch.device) -> Tensor:
    """What a mask_mod gave for a tile of shape `full`, bool, with the tile's rows and columns; `InvalidInput` where it is no such thing."""
    if isinstance(seen, bool):
        seen = torch.full((), seen, device=device)
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise InvalidInput(f"mask_mod must return bool, True = may attend, got {got}; use score_mod= to change scores")
    lead = [1] * (4 - seen.dim()) + list(seen.shape)
    if len(lead) != 4 or any(have not in (1, want) for have, want in zip(lead, full, strict=True)):
        raise InvalidInput(
            f"mask_mod must return bool that broadcasts to {full}, the shapes of b, h, q, k, got {list(seen.shape)}"
        )
    return seen.expand(*lead[:2], *full[2:])
