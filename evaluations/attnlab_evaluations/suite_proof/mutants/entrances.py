"""Mutants that the checks in `checks/entrances.py` must fail. Needs torch."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor

from attnlab import Reason, Request
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.mutants._shared import before_validation

ARGUMENTS = set(signature(TextbookAttention.forward).parameters) - {"self", "query", "key", "value"}


class CallsWithWhatItKnows(TextbookAttention):
    """`__call__` hands on the names that it knows and drops the others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **{n: x for n, x in kwargs.items() if n in ARGUMENTS})


def _drop_the_unknown(named: dict[str, Any]) -> None:
    for name in set(named) - ARGUMENTS - {"query", "key", "value", "module"}:
        named.pop(name)


@before_validation(_drop_the_unknown)
class HookDropsTheUnknown(TextbookAttention):
    """A forward pre-hook drops what the gate would not know."""


class ForwardIsReplaced(TextbookAttention):
    """An instance's forward takes any keyword."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        gate = TextbookAttention.forward

        def forward(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            return gate(self, query, key, value, **{n: x for n, x in kwargs.items() if n in ARGUMENTS})

        self.__dict__["forward"] = forward

    def __deepcopy__(self, memo: Any) -> ForwardIsReplaced:
        return type(self)(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )


class ForwardDropsSoftcap(ForwardIsReplaced):
    """`variant.forward(...)` is another entrance than `variant(...)`, and laxer."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is no part of this kernel")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        gate = TextbookAttention.forward

        def forward(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
            kwargs.pop("softcap", None)
            return gate(self, query, key, value, **kwargs)

        self.__dict__["forward"] = forward


class SupportsEverything(TextbookAttention):
    """`supports` replaces the gate's reasons by none: forward still refuses, tools that choose are misled."""

    capabilities = TextbookAttention.capabilities.narrow(bias="not yet", lse="not yet")

    def supports(self, request: Request) -> list[Reason]:
        return []


class SupportsIsAFlag(TextbookAttention):
    def supports(self, request: Request) -> Any:
        return True if not super().supports(request) else super().supports(request)


class SupportsFailsOnNewFeatures(TextbookAttention):
    """A table of the features that were known when it was written."""

    capabilities = TextbookAttention.capabilities.narrow(sinks="not yet")

    def supports(self, request: Request) -> list[Reason]:
        known = {"causal": 0, "mask": 0, "bias": 0, "dropout": 0, "backward": 0}
        assert all(name in known for name in request.features if name == "sinks"), "unknown feature"
        return super().supports(request)


class GivesTheFirstReason(TextbookLinear):
    def supports(self, request: Request) -> list[Reason]:
        return super().supports(request)[:1]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(CallsWithWhatItKnows, "unknown_arguments_are_rejected", "__call__ filters its keywords"),
    Mutant(HookDropsTheUnknown, "unknown_arguments_are_rejected", "a pre-hook filters keywords"),
    Mutant(ForwardIsReplaced, "unknown_arguments_are_rejected", "an instance's forward takes **kwargs"),
    Mutant(ForwardDropsSoftcap, "every_entry_point_refuses_undeclared_features", "forward() drops softcap"),
    Mutant(SupportsEverything, "supports_gives_reasons_for_refusals", "supports() forgets super()"),
    Mutant(SupportsIsAFlag, "supports_gives_reasons_for_refusals", "supports() returns True"),
    Mutant(SupportsFailsOnNewFeatures, "supports_gives_reasons_for_refusals", "supports() raises"),
    Mutant(GivesTheFirstReason, "supports_gives_reasons_for_refusals", "only the first reason is listed"),
)
