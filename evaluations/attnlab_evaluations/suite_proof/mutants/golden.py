"""Mutants that the checks in `checks/golden.py` must fail. Needs torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab import GoldenCase
from attnlab.formulas import golden_cases, linearised, softmax_dot_product
from attnlab.hooks import Mutant
from attnlab_evaluations.suite_proof.correct.textbook import TextbookAttention, TextbookLinear
from attnlab_evaluations.suite_proof.correct.textbook_scores import TextbookAdditive, wide


class FactorsWithoutGuard(TextbookAdditive):
    """tanh(a + b) = 1 - 2 / (1 + exp(2a) exp(2b)), where one factor may be infinite and the other 0."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        factors = torch.exp(2 * wide(query))[:, :, :, None] * torch.exp(2 * wide(key))[:, :, None]
        return 1 - 2 / (1 + factors)


class FactorsOfClampedRows(FactorsWithoutGuard):
    """The same with each side held to 40, so that 50 and -43 make tanh of 0 instead of 7."""

    def hidden(self, query: Tensor, key: Tensor) -> Tensor:
        return super().hidden(query.clamp(-40, 40), key.clamp(-40, 40))


def _without_scale(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> dict[str, Tensor]:
    others["scale"] = 1.0 if others["scale"] is None else others["scale"]
    return softmax_dot_product(query, key, value, **others)


class BothForgetTheScale(TextbookAttention):
    """Variant and definition leave the root of the width out, and so agree."""

    definition = staticmethod(_without_scale)
    # Scores 0 and log 3 after the division by 2: weights 1/4 and 3/4.
    golden = (
        GoldenCase(
            source="Vaswani et al. 2017, eq. 1, by hand",
            query=[[1.0, 0.0, 0.0, 0.0]],
            key=[[0.0, 0.0, 0.0, 0.0], [2 * math.log(3), 0.0, 0.0, 0.0]],
            value=[[4.0, 0.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0]],
            out=[[7.0, 0.0, 0.0, 0.0]],
            decimals=12,
        ),
    )

    def default_scale(self) -> float:
        return 1.0

    def scale(self, call: Any) -> float:
        return 1.0 if call.scale is None else float(call.scale)


def _dpfp(x: Tensor) -> Tensor:
    """[relu x, relu x] where [relu x, relu -x] is meant, with each feature times its neighbour (nu = 1)."""
    both = torch.relu(torch.cat([x, x], dim=-1))
    return both * both.roll(1, dims=-1)


def _dpfp_definition(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> dict[str, Tensor]:
    options = {**others.pop("options"), "feature_map": "relu"}  # relu leaves features, which are not negative, alone
    return linearised(_dpfp(query), _dpfp(key), value, options=options, **others)


class BothForgetTheSignOfDPFP(TextbookLinear):
    """Schlag et al. 2021, eq. 37, with relu(x) twice: variant and definition agree, and both are wrong."""

    formula = "dpfp"
    definition = staticmethod(_dpfp_definition)
    capabilities = replace(TextbookLinear.capabilities, linear_memory=False)
    # x = (1, -1): [relu x, relu -x] = (1, 0, 0, 1), times its roll (1, 1, 0, 0) = (1, 0, 0, 0), and
    # x = (1, 1): (1, 1, 0, 0) times (0, 1, 1, 0) = (0, 1, 0, 0). The query (1, -1) meets the first key alone.
    golden = (
        GoldenCase(
            source="Schlag et al. 2021, eq. 37, by hand",
            query=[[1.0, -1.0]],
            key=[[1.0, -1.0], [1.0, 1.0]],
            value=[[4.0, 1.0], [8.0, 2.0]],
            out=[[4.0, 1.0]],
            decimals=12,
        ),
    )

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return _dpfp(x)


def _dpfp_with_a_sign(x: Tensor) -> Tensor:
    """[relu x, -relu x]: the sign outside the rectifier, as a published implementation once had it."""
    both = torch.cat([torch.relu(x), -torch.relu(x)], dim=-1)
    return both * both.roll(1, dims=-1)


def _signed_definition(
    query: Tensor, key: Tensor, value: Tensor, *, visible: Tensor, **others: Any
) -> dict[str, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    products = _dpfp_with_a_sign(query) @ _dpfp_with_a_sign(key).transpose(-1, -2)
    products = products.masked_fill(~visible, 0)
    total = products.sum(-1, keepdim=True)
    return {"out": products @ value / total.masked_fill(total == 0, 1)}


class _Dpfp:
    """What attnlab's own golden cases of DPFP are chosen by."""

    formula = "linearised"
    options = {"feature_map": "dpfp"}  # noqa: RUF012


class BothPutTheSignOutsideTheRectifier(TextbookLinear):
    """Schlag et al. 2021, eq. 37, with -relu(x) for relu(-x); judged by the cases of the built-in map, nu = 1."""

    formula = "dpfp"
    definition = staticmethod(_signed_definition)
    capabilities = replace(TextbookLinear.capabilities, linear_memory=False)
    golden = tuple(
        replace(one, options={}, extra_options={}) for one in golden_cases(_Dpfp()) if one.extra_options == {"nu": 1}
    )

    def feature_map(self, x: Tensor, *, role: Literal["query", "key"], positions: Tensor) -> Tensor:
        return _dpfp_with_a_sign(x)


class OnlyTheDefinitionIsWrong(TextbookAttention):
    """The right variant beside a definition with a mistake: the message must not blame the variant."""

    definition = staticmethod(_without_scale)
    golden = BothForgetTheScale.golden


MUTANTS: tuple[Mutant, ...] = (
    Mutant(FactorsWithoutGuard, "golden_cases_are_reproduced", "exp(2a) exp(2b) without a guard"),
    Mutant(FactorsOfClampedRows, "golden_cases_are_reproduced", "exp(2a) exp(2b) of clamped rows"),
    Mutant(BothForgetTheScale, "golden_cases_are_reproduced", "variant and definition forget 1 / sqrt(d)"),
    Mutant(BothForgetTheSignOfDPFP, "golden_cases_are_reproduced", "DPFP as [relu x, relu x]"),
    Mutant(BothPutTheSignOutsideTheRectifier, "golden_cases_are_reproduced", "DPFP as [relu x, -relu x]"),
    Mutant(OnlyTheDefinitionIsWrong, "golden_cases_are_reproduced", "a definition with a wrong scale"),
)
