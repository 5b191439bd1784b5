"""Mutants of constructors and of what surrounds the gate. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.call import Call
from attnlab.capabilities import Reason
from attnlab.errors import InvalidInput
from attnlab.interface import ARGUMENTS
from attnlab.request import Request
from attnlab_evaluations.suite_proof.mutants._methods import TextbookAdditive, TextbookLuong
from attnlab_evaluations.suite_proof.mutants._sums import TextbookMaps
from attnlab_evaluations.suite_proof.mutants._textbook import Mutant, TextbookAttention, before_the_gate

# -- options and sizes -----------------------------------------------------------------------------------------


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


class HoldsALambda(TextbookAttention):
    """A lambda among the attributes: the instance cannot be pickled."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.turned: Callable[[Tensor], Tensor] = lambda x: x.transpose(-1, -2)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return q @ self.turned(k)


class DrawsATableOnce(TextbookAttention):
    """A random buffer that state_dict leaves out."""

    table: Tensor

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.register_buffer("table", 1 + 0.1 * torch.rand(self.num_heads, 1, 1), persistent=False)

    def scores(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().scores(q, k, call) * (self.table.to(q) / self.table.to(q).mean())


# -- the gate --------------------------------------------------------------------------------------------------


class CallsWithWhatItKnows(TextbookAttention):
    """`__call__` hands on the names that it knows and drops the others."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **{n: x for n, x in kwargs.items() if n in ARGUMENTS})


class CallsWithoutSoftcap(TextbookAttention):
    """`__call__` drops an argument that is not declared."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is no part of this kernel")

    def __call__(self, *args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def _drop_the_unknown(named: dict[str, Any]) -> None:
    for name in set(named) - ARGUMENTS - {"query", "key", "value", "module"}:
        named.pop(name)


@before_the_gate(_drop_the_unknown)
class HookDropsTheUnknown(TextbookAttention):
    """A forward pre-hook drops what the gate would not know."""


class WidensItsGate(TextbookAttention):
    """The gate's own number is changed, so that an undeclared argument passes and is dropped."""

    capabilities = TextbookAttention.capabilities.narrow(sinks="not in this kernel")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._bits = TextbookAttention.capabilities.bits

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        call.sinks = None
        return super().attend(query, key, value, call)


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


@before_the_gate(
    lambda named: named.update(
        mask=named["mask"] == 0
        if isinstance(named.get("mask"), Tensor) and named["mask"].is_floating_point()
        else named.get("mask")
    )
)
class TakesFloatMasks(TextbookAttention):
    """A float mask is read as "0 may attend", whatever else it holds."""


@before_the_gate(
    lambda named: named.update(
        offset="bottom_right"
        if named.get("causal") is True and named.get("offset") is None and named.get("state") is None
        else named.get("offset")
    )
)
class GuessesTheAlignment(TextbookAttention):
    """causal at two lengths is read as bottom-right without being told."""


@before_the_gate(lambda named: named.update(dropout_p=min(max(named.get("dropout_p", 0.0), 0.0), 1.0)))
class ClipsTheProbability(TextbookAttention):
    """dropout_p=1.5 becomes 1.0."""


MUTANTS = (
    Mutant(SwallowsOptions, "unknown_options_are_rejected", "**kwargs in the constructor"),
    Mutant(RejectsWithoutAName, "unknown_options_are_rejected", "an error that names no option"),
    Mutant(IgnoresKeyValueHeads, "sizes_are_kept_and_judged", "num_kv_heads is dropped"),
    Mutant(IgnoresTheValueWidth, "sizes_are_kept_and_judged", "value_dim is dropped"),
    Mutant(JudgesNoSizes, "sizes_are_kept_and_judged", "sizes pass around the base class"),
    Mutant(RecordsNoOptions, "options_are_honoured", "options that copies need are not kept"),
    Mutant(RecordsTheDefault, "options_are_honoured", "options hold the default, whatever was given"),
    Mutant(UnknownMapsAreElu, "options_are_honoured", "an unknown value falls back to the default"),
    Mutant(OneMatrixForAllInstances, "instances_are_their_own", "a parameter on the class"),
    Mutant(HoldsALambda, "copies_agree", "an attribute that does not pickle"),
    Mutant(DrawsATableOnce, "copies_agree", "a random buffer outside the state_dict"),
    Mutant(CallsWithWhatItKnows, "unknown_arguments_are_rejected", "__call__ filters its keywords"),
    Mutant(CallsWithoutSoftcap, "refuses_what_it_does_not_declare", "__call__ drops softcap"),
    Mutant(HookDropsTheUnknown, "unknown_arguments_are_rejected", "a pre-hook filters keywords"),
    Mutant(WidensItsGate, "refuses_what_it_does_not_declare", "the gate's bits are widened"),
    Mutant(ForwardIsReplaced, "unknown_arguments_are_rejected", "an instance's forward takes **kwargs"),
    Mutant(ForwardDropsSoftcap, "other_entrances_refuse_alike", "forward() drops softcap"),
    Mutant(SupportsEverything, "supports_names_what_is_refused", "supports() forgets super()"),
    Mutant(SupportsIsAFlag, "supports_names_what_is_refused", "supports() returns True"),
    Mutant(SupportsFailsOnNewFeatures, "supports_names_what_is_refused", "supports() raises"),
    Mutant(TakesFloatMasks, "bad_inputs_are_invalid", "a float mask is accepted"),
    Mutant(GuessesTheAlignment, "bad_inputs_are_invalid", "two lengths without an offset"),
    Mutant(ClipsTheProbability, "bad_inputs_are_invalid", "dropout_p above 1 is clipped"),
    Mutant(ForgetsToInitialise, "parameters_are_initialised", "torch.empty without an initialisation"),
    Mutant(NarrowsItsClass, "making_one_changes_no_other", "an option narrows the class"),
)
