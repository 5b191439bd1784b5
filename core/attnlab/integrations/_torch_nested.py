"""Nested tensors for `attnlab.integrations.torch_mha`: padded on the way in, nested again on the way out. Needs torch.

`nn.TransformerEncoder` makes them of padded input in eval mode where no gradient is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.errors import InvalidInput


class Padded:
    """`query`, `key` and `value` `[N, L, E]` with zeros behind, and `hidden`, bool `[N, S]`: True where no key is.

    One tensor stays one tensor, as self-attention is told by that. Raises `InvalidInput` where only some are nested, or jagged.
    """

    def __init__(self, subject: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        for word, x in (("query", query), ("key", key), ("value", value)):
            if not x.is_nested or x.layout != torch.strided:
                got = f"a nested one of layout {x.layout}" if x.is_nested else "a dense one"
                raise InvalidInput(
                    f"{subject}: query, key and value must be nested tensors of layout torch.strided where one of them is "
                    f"nested, got {word} {got}; pad them with to_padded_tensor(0.0) and give key_padding_mask="
                )
        self.query_lengths = _lengths(query)
        key_lengths = _lengths(key)
        if _lengths(value) != key_lengths:
            raise InvalidInput(
                f"{subject}: key and value must have the same lengths, got {key_lengths} and {_lengths(value)}"
            )
        self.query = query.to_padded_tensor(0.0)
        self.key = self.query if key is query else key.to_padded_tensor(0.0)
        self.value = self.key if value is key else value.to_padded_tensor(0.0)
        self.hidden = ~_counted(key_lengths, self.key)

    def nested(self, out: Tensor) -> Tensor:
        """`out [N, L, E]` without its padding, nested as query was."""
        kept = [rows[:length] for rows, length in zip(out, self.query_lengths, strict=True)]
        nested: Tensor = torch.nested.as_nested_tensor(kept)
        return nested

    def without_padding(self, weights: Tensor) -> Tensor:
        """`weights [N, L, S]` or `[N, H, L, S]` with zeros in the rows of queries that are not there."""
        there = _counted(self.query_lengths, self.query)[..., None]  # [N, L, 1]
        return weights.masked_fill(~(there if weights.dim() == 3 else there[:, None]), 0)


def _lengths(x: Any) -> list[int]:
    return [len(one) for one in x.unbind()]


def _counted(lengths: list[int], padded: Tensor) -> Tensor:
    """Bool `[N, L]`: True at the first `lengths[n]` places."""
    places = torch.arange(padded.shape[1], device=padded.device)
    return places < torch.tensor(lengths, device=padded.device)[:, None]
