"""What mutants of several files share: bases, small helpers, and a decorator that changes arguments. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab import Attention, AttentionOutput, Call, Visibility
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookMaps
from attnlab_evaluations.suite_proof.correct.textbook_tiled import Gradients, Saved, TextbookTiled, Tile


def before_validation(change: Callable[[dict[str, Any]], None]) -> Callable[[type[Attention]], type[Attention]]:
    """A class decorator: every call's arguments pass through `change`, as an adapter around the variant would do it."""

    def decorate(cls: type[Attention]) -> type[Attention]:
        first = cls.__init__

        def init(self: Attention, **options: Any) -> None:
            first(self, **options)

            def hook(module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                named["module"] = module
                change(named)
                named.pop("module")
                return (), named

            self.register_forward_pre_hook(hook, with_kwargs=True)

        cls.__init__ = init  # type: ignore[method-assign]
        return cls

    return decorate


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


class _Backward(TextbookTiled):
    """Backward's tile in two steps: its inputs, then what becomes of the gradients that one tile gives."""

    def backward_tile(
        self, call: Call, visibility: Visibility, t: Tile, saved: Saved, d_out: Tensor, delta: Tensor, into: Gradients
    ) -> None:
        own = Gradients(*(None if x is None else torch.zeros_like(x) for x in into))  # type: ignore[arg-type]
        call, visibility, t, saved, d_out, delta = self.inputs_of(call, visibility, t, saved, d_out, delta)
        super().backward_tile(call, visibility, t, saved, d_out, delta, own)
        for total, part in zip(into, self.gradients_of(own, saved, call, t), strict=True):
            if total is not None and part is not None:
                total += part

    def inputs_of(self, *inputs: Any) -> tuple[Any, ...]:
        return inputs

    def gradients_of(self, own: Gradients, saved: Saved, call: Call, t: Tile) -> Gradients:
        return own


class CompilingTextbook(TextbookAttention):
    """Correct, and captured whole at any length."""

    capabilities = replace(TextbookAttention.capabilities, compiles=True, exports=True)


class _Relu(TextbookMaps):
    """relu where nothing else is named."""

    def __init__(self, *, feature_map: str = "relu", **sizes: Any) -> None:
        super().__init__(feature_map=feature_map, **sizes)


class _Exp(TextbookMaps):
    def __init__(self, *, feature_map: str = "exp", **sizes: Any) -> None:
        super().__init__(feature_map=feature_map, **sizes)


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)


class _Returned(TextbookAttention):
    """The answer's weights and lse pass through one more step."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> AttentionOutput:
        answer = super().attend(query, key, value, call)
        if answer.weights is not None:
            answer = answer._replace(weights=self.weights_of(answer.weights, call))
        return answer if answer.lse is None else answer._replace(lse=self.lse_of(answer.lse, call))

    def weights_of(self, weights: Tensor, call: Call) -> Tensor:
        return weights

    def lse_of(self, lse: Tensor, call: Call) -> Tensor:
        return lse
