"""Long inputs, judged by some of their rows: a definition's row needs that row's visible keys alone. Needs torch.

What only shows past a kernel's tile (256, 1024, ...) needs lengths at which neither all pairs nor the scalar predicate
of every pair are affordable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, bound, largest
from attnlab.conformance.oracle import visibility
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import Gradients, direction_for, recorded, trained
from attnlab.conformance.oracle.draws import require_exact, require_served
from attnlab.conformance.oracle.inputs import Inputs, judging, parameters_of, plain_dtype, reduction_terms


def sampled_rows(case: Case) -> list[int]:
    """The first and last rows, those beside the borders of tiles of 64 and 1024, and some between."""
    last = case.query_length - 1
    wanted = (0, 1, 63, 64, 65, 255, 256, last // 2, 1023, 1024, last - 70, last - 1, last)
    return sorted({row for row in wanted if 0 <= row <= last})


def rows_of(tensor: Tensor, rows: Sequence[int], axis: int = 2) -> Tensor:
    """Those rows of an axis; all of it where the axis is broadcast."""
    index = torch.tensor(rows, device=tensor.device)
    return tensor if tensor.shape[axis] == 1 else tensor.index_select(axis, index)


def visible_rows(inputs: Inputs, rows: Sequence[int]) -> Tensor:
    """Bool `[B, Hq, rows, Lk]` by the scalar predicate."""
    return visibility.dense(inputs.rules(), rows).to(inputs.query.device)


def define_rows(
    variant: Any,
    inputs: Inputs,
    rows: Sequence[int],
    visible: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    parameters: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The definition's answer for some query rows; `UnsupportedRequest` as for `define`."""
    require_served(variant, inputs)
    rules = inputs.rules()
    query_positions, key_positions = (p.to(inputs.query.device) for p in visibility.positions(rules))
    cast = inputs.rebuilt({name: x.to(dtype) for name, x in inputs.tensors().items()})
    names = ("scale", "bias", "softcap", "score_mod", "sinks", "gates")
    arguments = {n: cast.arguments.get(n) for n in names}
    arguments["score_mod"] = visibility.score_mod_of(rules, arguments["score_mod"], rows)
    if arguments["bias"] is not None:
        arguments["bias"] = rows_of(arguments["bias"], rows)
    answer: dict[str, Tensor] = judging(variant)(
        rows_of(cast.query, rows),
        cast.key,
        cast.value,
        visible=visible,
        parameters=parameters_of(variant, dtype) if parameters is None else parameters,
        options=variant.options,
        positions=(rows_of(query_positions, rows, 1), key_positions),
        **arguments,
    )
    return answer


def exact_rows_and_bound(variant: Any, inputs: Inputs, rows: Sequence[int]) -> tuple[Tensor, Bound]:
    """The float64 out of those rows, and the bound on errors against it."""
    require_exact(variant, inputs)
    visible, low = visible_rows(inputs, rows), plain_dtype(inputs.case.dtype)
    with torch.no_grad():
        exact = define_rows(variant, inputs, rows, visible)["out"]
        plain = define_rows(variant, inputs, rows, visible, dtype=getattr(torch, low))["out"]
    limit = bound(
        inputs.case.dtype,
        exact=exact,
        plain=plain,
        plain_dtype=low,
        terms=reduction_terms(inputs.case),
        magnitude=largest(inputs.value),
    )
    return exact, limit


def direction_of_rows(inputs: Inputs, rows: Sequence[int]) -> Tensor:
    """A gradient for out that asks for those rows alone."""
    whole = direction_for(inputs)
    keep = torch.zeros(whole.shape[2], 1, dtype=torch.bool, device=whole.device)
    keep[list(rows)] = True
    return torch.where(keep, whole, 0)


def defined_row_gradients(
    variant: Any, inputs: Inputs, rows: Sequence[int], direction: Tensor, visible: Tensor, dtype: torch.dtype
) -> Gradients:
    """The definition's gradients of `sum(out * direction)`, where `direction` asks for those rows alone."""
    require_exact(variant, inputs)
    leaves = recorded(inputs.tensors(), dtype)
    state = parameters_of(variant, dtype)
    parameters = {n: state[n].clone().requires_grad_() for n in trained(variant)}
    with torch.enable_grad():
        out = define_rows(
            variant, inputs.rebuilt(leaves), rows, visible, dtype=dtype, parameters={**state, **parameters}
        )["out"]
        found = torch.autograd.grad(
            out,
            [*leaves.values(), *parameters.values()],
            rows_of(direction, rows).to(dtype),
            allow_unused=True,
            materialize_grads=True,
        )
    return dict(zip([*leaves, *parameters], found, strict=True))
