"""Mutants that the checks in `checks/refusals.py` must fail. Needs torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnlab import Call
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention
from attnlab_evaluations.suite_proof.mutants._shared import before_validation


@before_validation(lambda named: named.pop("softcap", None))
class SwallowsSoftcap(TextbookAttention):
    """Declares no softcap and takes it anyway: the argument is dropped without a word."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is not part of this variant")


class CallsWithoutSoftcap(TextbookAttention):
    """`__call__` drops an argument that is not declared."""

    capabilities = TextbookAttention.capabilities.narrow(softcap="it is no part of this kernel")

    def __call__(self, *args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class WidensItsGate(TextbookAttention):
    """The gate's own number is changed, so that an undeclared argument passes and is dropped."""

    capabilities = TextbookAttention.capabilities.narrow(sinks="not in this kernel")

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._bits = TextbookAttention.capabilities.bits

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        call.sinks = None
        return super().attend(query, key, value, call)


@before_validation(
    lambda named: named.update(
        mask=named["mask"] == 0
        if isinstance(named.get("mask"), Tensor) and named["mask"].is_floating_point()
        else named.get("mask")
    )
)
class TakesFloatMasks(TextbookAttention):
    """A float mask is read as "0 may attend", whatever else it holds."""


@before_validation(
    lambda named: named.update(
        offset="bottom_right"
        if named.get("causal") is True and named.get("offset") is None and named.get("state") is None
        else named.get("offset")
    )
)
class GuessesTheAlignment(TextbookAttention):
    """causal at two lengths is read as bottom-right without being told."""


@before_validation(lambda named: named.update(dropout_p=min(max(named.get("dropout_p", 0.0), 0.0), 1.0)))
class ClipsTheProbability(TextbookAttention):
    """dropout_p=1.5 becomes 1.0."""


def _guess_the_axes(named: dict[str, Any]) -> None:
    mask = named.get("mask")
    if isinstance(mask, Tensor) and mask.dim() == 3:
        named["mask"] = mask[:, None]


@before_validation(_guess_the_axes)
class GuessesAThreeAxesMask(TextbookAttention):
    pass


MUTANTS: tuple[Mutant, ...] = (
    Mutant(SwallowsSoftcap, "undeclared_features_are_refused", "an undeclared argument is swallowed"),
    Mutant(CallsWithoutSoftcap, "undeclared_features_are_refused", "__call__ drops softcap"),
    Mutant(WidensItsGate, "undeclared_features_are_refused", "the gate's bits are widened"),
    Mutant(TakesFloatMasks, "bad_inputs_are_invalid", "a float mask is accepted"),
    Mutant(GuessesTheAlignment, "bad_inputs_are_invalid", "two lengths without an offset"),
    Mutant(ClipsTheProbability, "bad_inputs_are_invalid", "dropout_p above 1 is clipped"),
    Mutant(GuessesAThreeAxesMask, "bad_inputs_are_invalid", "a mask [B, Lq, Lk] is given a head axis silently"),
)
