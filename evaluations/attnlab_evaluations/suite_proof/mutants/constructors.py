"""Mutants that the checks in `checks/constructors.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab import InvalidInput
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive, TextbookLuong, wide
from attnlab_evaluations.suite_proof.correct.textbook_sums import TextbookMaps


class SwallowsOptions(TextbookAttention):
    """**options that nothing reads: a typing error passes for a setting."""

    def __init__(self, **options: Any) -> None:
        names = ("num_heads", "head_dim", "num_kv_heads", "key_dim", "value_dim")
        super().__init__(**{name: options[name] for name in names if name in options})


class RejectsWithoutAName(TextbookAttention):
    def __init__(self, **options: Any) -> None:
        names = {"num_heads", "head_dim", "num_kv_heads", "key_dim", "value_dim"}
        if set(options) - names:
            raise InvalidInput("RejectsWithoutAName: bad options")
        super().__init__(**options)


class IgnoresKeyValueHeads(TextbookAttention):
    """Grouped heads are asked for and not made."""

    def __init__(self, *, num_kv_heads: int | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)


class IgnoresTheValueWidth(TextbookAttention):
    def __init__(self, *, value_dim: int | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)


class JudgesNoSizes(TextbookAttention):
    """Sizes are set after a constructor that was handed harmless ones."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(num_heads=1, head_dim=1)
        heads = sizes["num_heads"]
        self.num_heads, self.head_dim = heads, sizes["head_dim"]
        self.num_kv_heads = sizes.get("num_kv_heads") or heads
        self.key_dim = sizes.get("key_dim") or self.head_dim
        self.value_dim = sizes.get("value_dim") or self.key_dim


class RecordsNoOptions(TextbookAdditive):
    """hidden_size is used and not kept, so that copies have another."""

    def __init__(self, *, hidden_size: int | None = 5, **sizes: Any) -> None:
        super().__init__(hidden_size=hidden_size, **sizes)
        self.options = {}


class RecordsTheDefault(TextbookAdditive):
    def __init__(self, *, hidden_size: int | None = None, **sizes: Any) -> None:
        super().__init__(hidden_size=hidden_size, **sizes)
        self.options = {"hidden_size": self.head_dim}


class UnknownMapsAreElu(TextbookMaps):
    """A name that it does not know falls back to the default without a word."""

    def __init__(self, *, feature_map: str = "elu", **sizes: Any) -> None:
        super().__init__(**sizes)
        self.options = {"feature_map": feature_map}

    def feature_map(self, x: Tensor, **named: Any) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class OneMatrixForAllInstances(TextbookLuong):
    """The parameter lives on the class."""

    shared: dict[Any, nn.Parameter] = {}  # noqa: RUF012

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.W_a = self.shared.setdefault(tuple(self.W_a.shape), self.W_a)


class ForgetsToInitialise(TextbookLuong):
    """torch.empty, and no reset_parameters() after it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.W_a = nn.Parameter(torch.empty(self.W_a.shape))


class NarrowsItsClass(TextbookMaps):
    """An option of one instance takes a capability from all."""

    def __init__(self, *, feature_map: str = "elu", rounded: bool = False, **sizes: Any) -> None:
        super().__init__(feature_map=feature_map, **sizes)
        self.options["rounded"] = rounded
        if rounded:
            type(self).capabilities = type(self).capabilities.narrow(exact="sums are rounded")


class AnotherMapIsSquared(TextbookMaps):
    """One of the maps that the option offers, and not the default, is wrong."""

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        features = super().feature_map(x, role=role, positions=positions)
        return features**2 if self.options["feature_map"] == "relu" else features


class ConcatForgetsItsVector(TextbookLuong):
    """Only another score than the default is wrong: concat without v."""

    def scores(self, query: Tensor, key: Tensor, *, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        if self.options["score"] == "concat":
            return torch.tanh(wide(query)[:, :, :, None] + wide(key)[:, :, None]).sum(-1)
        return super().scores(query, key, query_positions=query_positions, key_positions=key_positions)


class ReadsASizeThatMayBeLeftOut(TextbookAttention):
    """num_heads // num_kv_heads before the default is settled."""

    def __init__(self, *, num_heads: int, num_kv_heads: Any = None, **sizes: Any) -> None:
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads, **sizes)
        self.group = num_heads // num_kv_heads


MUTANTS: tuple[Mutant, ...] = (
    Mutant(SwallowsOptions, "unknown_options_are_rejected", "**kwargs in the constructor"),
    Mutant(RejectsWithoutAName, "unknown_options_are_rejected", "an error that names no option"),
    Mutant(IgnoresKeyValueHeads, "sizes_are_kept_and_validated", "num_kv_heads is dropped"),
    Mutant(IgnoresTheValueWidth, "sizes_are_kept_and_validated", "value_dim is dropped"),
    Mutant(JudgesNoSizes, "sizes_are_kept_and_validated", "sizes pass around the base class"),
    Mutant(RecordsNoOptions, "options_are_honoured", "options that copies need are not kept"),
    Mutant(RecordsTheDefault, "options_are_honoured", "options hold the default, whatever was given"),
    Mutant(UnknownMapsAreElu, "options_are_honoured", "an unknown value falls back to the default"),
    Mutant(OneMatrixForAllInstances, "instances_share_no_parameters", "a parameter on the class"),
    Mutant(ForgetsToInitialise, "parameters_are_initialised", "torch.empty without an initialisation"),
    Mutant(NarrowsItsClass, "instances_do_not_change_their_class", "an option narrows the class"),
    Mutant(AnotherMapIsSquared, "options_are_honoured", "another choice than the default is wrong"),
    Mutant(ConcatForgetsItsVector, "options_are_honoured", "another score than the default is wrong"),
    Mutant(ReadsASizeThatMayBeLeftOut, "sizes_are_kept_and_validated", "num_kv_heads=None is divided by"),
)
