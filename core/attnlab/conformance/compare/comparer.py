"""The comparer of a check: it owns tolerances and messages. Needs torch.

inputs, compare = drawn(case, variant)
compare.same(permuted.out(variant), inputs.out(variant), "the call with keys in their first order", "Look for ...")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from attnlab.conformance.compare.messages import demand, demand_close, demand_finite, demand_zero
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.bounds import exact_and_bound
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Answer, Gradients, direction_for
from attnlab.conformance.oracle.inputs import Inputs, draw, gradient_terms, reduction_terms

DEFINITION = "the float64 definition"


@dataclass(frozen=True, slots=True)
class Comparer:
    """Compares what one call of `variant` returns; messages name the variant, the case and the element at fault."""

    variant: Any
    inputs: Inputs

    @property
    def case(self) -> Case:
        """The case that messages name."""
        return self.inputs.case

    def demand(self, condition: bool, fault: str, advice: str) -> None:
        """Fail with `fault` and `advice` unless `condition`."""
        demand(condition, self.variant, self.case, fault, advice)

    def fail(self, fault: str, advice: str) -> NoReturn:
        """Fail with `fault` and `advice`."""
        fail(self.variant, self.case, fault, advice)

    def close(self, got: Tensor | None, exact: Tensor, limit: Bound, versus: str, advice: Any, **more: Any) -> None:
        """`demand_close`: `what` is "out" unless stated."""
        more.setdefault("what", "out")
        demand_close(got, exact, limit, self.variant, self.case, versus=versus, advice=advice, **more)

    def defined(
        self, got: Tensor | None, advice: Any, versus: str = DEFINITION, what: str = "out", inputs: Inputs | None = None
    ) -> None:
        """Fail unless `got` is what the definition gives for `inputs` (those of the comparer, unless stated)."""
        inputs = inputs or self.inputs
        exact, limit = exact_and_bound(self.variant, inputs, what)
        self.close(got, exact, limit, versus, advice, what=what, inputs=inputs)

    def same(
        self,
        got: Tensor | None,
        expected: Tensor,
        versus: str,
        advice: Any,
        what: str = "out",
        *,
        magnitude: float | None = None,
        terms: int | None = None,
    ) -> None:
        """Fail unless two runs of the variant agree within rounding.

        magnitude: the size of what is summed, that of value unless stated; terms: how many, those of the case unless stated.
        """
        size = max(largest(expected), largest(self.inputs.value) if magnitude is None else magnitude)
        limit = rounding_bound(self.case.dtype, terms=terms or reduction_terms(self.case), magnitude=size)
        self.close(got, expected, limit, versus, advice, what=what)

    def same_gradients(
        self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], versus: str, advice: Any
    ) -> None:
        """`same` for every gradient in `expected`, of sum(out * direction_for(inputs))."""
        size = largest(direction_for(self.inputs)) * largest(self.inputs.value)
        for name, gradient in expected.items():
            sizes: dict[str, Any] = {"magnitude": size, "terms": gradient_terms(self.case, gradient)}
            self.same(got[name], gradient, versus, advice, f"gradient of {name}", **sizes)

    def same_answer(self, got: Answer, expected: Answer, versus: str, advice: Any) -> None:
        """`same` for out and every gradient, as `differentiated` returns them."""
        self.same(got[0], expected[0], versus, advice)
        self.same_gradients(got[1], expected[1], versus, advice)

    def close_gradients(
        self,
        got: Gradients,
        exact: Mapping[str, tuple[Tensor, Bound]],
        advice: str,
        versus: str = "the gradient of the float64 definition",
        what: str = "gradient",
    ) -> None:
        """`close` for every gradient in `exact`."""
        for name, (gradient, limit) in exact.items():
            self.close(got[name], gradient, limit, versus, advice, what=f"{what} of {name}")

    def zero(self, got: Tensor, what: str, why: str, advice: str) -> None:
        """Fail unless every element is exactly 0."""
        demand_zero(got, self.variant, self.case, what=what, why=why, advice=advice)

    def finite(self, got: Tensor, what: str, why: str, advice: str) -> None:
        """Fail where anything is NaN or infinite."""
        demand_finite(got, self.variant, self.case, what=what, why=why, advice=advice)


def drawn(case: Case, variant: Any) -> tuple[Inputs, Comparer]:
    """The inputs of `case` for `variant`, and the comparer of a call on them."""
    inputs = draw(case, variant)
    return inputs, Comparer(variant, inputs)


def fail(variant: Any, case: Case, fault: str, advice: str) -> NoReturn:
    """Fail with `fault` and `advice`."""
    demand(False, variant, case, fault, advice)
    raise AssertionError


def short(fault: BaseException, most: int = 1000) -> str:
    """The exception's text on one line, cut to `most` characters."""
    return " ".join(str(fault).split())[:most]
