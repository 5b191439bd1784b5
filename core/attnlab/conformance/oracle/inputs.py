"""The tensors of a case, the variant's answer to them, and the definition's. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import ASKABLE
from attnlab.conformance.oracle import visibility
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.features import feature, normal
from attnlab.conformance.oracle.machinery import machinery_of
from attnlab.conformance.oracle.seeds import draws_freely, seeded_draws
from attnlab.conformance.running.check import NotApplicable
from attnlab.errors import PluginError, UnsupportedRequest
from attnlab.formulas import Definition, definition_of
from attnlab.request import Request

FLOAT_ARGUMENTS = ("bias", "sinks")
MASK_ARGUMENTS = (
    "causal",
    "offset",
    "window",
    "key_mask",
    "key_lengths",
    "query_lengths",
    "segments",
    "mask",
    "mask_mod",
)
MAIN = ("query", "key", "value")
AXES: Mapping[str, str] = {
    "query": "bhq.",
    "key": "bck.",
    "value": "bck.",
    "mask": "bhqk",
    "bias": "bhqk",
    "key_mask": "bk",
    "key_lengths": "b",
    "query_lengths": "b",
    "query_segments": "bq",
    "key_segments": "bk",
    "sinks": "h",
    "offset": "b",
    "out": "bhq.",
    "weights": "bhqk",
    "lse": "bhq",
}
"""Which axis is that of items (b), query heads (h), key/value heads (c), queries (q) and keys (k), of arguments and outputs. Gates have
the axes of keys."""


def taken(name: str, x: Tensor, index: Mapping[str, Sequence[int] | Tensor]) -> Tensor:
    """`x`, an argument or output of this name (or a gradient of one), with those indices of the named axes; axes of size 1 are broadcast."""
    axes = AXES.get(name, "bck." if name.startswith("gates.") else "")
    axes = axes[-x.dim() :] if name == "mask" else axes[: x.dim()]
    for axis, letter in enumerate(axes):
        if letter in index and (x.shape[axis] > 1 or name in (*MAIN, "out", "weights", "lse")):
            x = x.index_select(axis, torch.as_tensor(index[letter], device=x.device))
    return x


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call. `arguments` are the keyword arguments of `Attention.forward`."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def main(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def run(self, variant: Any, **more: Any) -> Any:
        """The variant's `AttentionOutput`; `more` are further arguments. Where it may draw, it draws from one seed."""
        fixed = draws_freely(variant) and not more.get("dropout_p")
        with seeded_draws(self.case.seed, self.case.device) if fixed else nullcontext():
            return variant(*self.main, **{**self.arguments, **more})

    def out(self, variant: Any, **more: Any) -> Tensor:
        """Out of `run` without gradients."""
        return self.answer(variant, **more).out  # type: ignore[no-any-return]

    def seeded_out(self, call: Any, **more: Any) -> Tensor:
        """The same, random numbers from the case's seed also where `call` is a function, as a compiled variant is."""
        with seeded_draws(self.case.seed, self.case.device):
            return self.out(call, **more)

    def answer(self, variant: Any, **more: Any) -> Any:
        """`run` without gradients."""
        with torch.no_grad():
            return self.run(variant, **more)

    def with_tensors(self, **tensors: Any) -> Inputs:
        """A copy with other query, key, value, or arguments by name."""
        main = {name: tensors.pop(name) for name in MAIN if name in tensors}
        return replace(self, **main, arguments={**self.arguments, **tensors})

    def without(self, *names: str) -> Inputs:
        """A copy without those arguments."""
        return replace(self, arguments={n: x for n, x in self.arguments.items() if n not in names})

    def with_mask_object(self) -> Inputs:
        """A copy whose mask arguments are stated in one `AttentionMask`."""
        from attnlab.visibility import AttentionMask

        stated = {n: self.arguments[n] for n in MASK_ARGUMENTS if n in self.arguments}
        if "mask" in stated:
            stated["allowed"] = stated.pop("mask")
        return self.without(*MASK_ARGUMENTS).with_tensors(mask=AttentionMask(**stated))

    def rules(self) -> visibility.Rules:
        """The arguments that decide visibility, for the scalar predicate."""
        return visibility.Rules.of(
            batch=self.query.shape[0],
            heads=self.query.shape[1],
            queries=self.query.shape[2],
            keys=self.key.shape[2],
            **{k: v for k, v in self.arguments.items() if k in visibility.Rules.__dataclass_fields__},
        )

    def visible(self, rows: Sequence[int] | None = None) -> Tensor:
        """Visibility as bool `[B, Hq, Lq, Lk]` (or of those rows), on the case's device. It is worked out once."""
        known = ("visible", None if rows is None else tuple(rows), self.query.shape[:3], self.key.shape[2])
        if known not in self._known:
            self._known[known] = visibility.dense(self.rules(), rows).to(self.query.device)
        visible: Tensor = self._known[known]
        return visible

    def positions(self) -> tuple[Tensor, Tensor]:
        """Positions of queries `[B, Lq]` and of keys `[B, Lk]` as a formula reads them. They are worked out once."""
        known = ("positions", self.query.shape[:3], self.key.shape[2])
        if known not in self._known:
            self._known[known] = tuple(p.to(self.query.device) for p in visibility.positions(self.rules()))
        positions: tuple[Tensor, Tensor] = self._known[known]
        return positions

    def tensors(self) -> dict[str, Tensor]:
        """Every differentiable tensor of the call by name; gates as `gates.beta`."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        named |= {n: self.arguments[n] for n in FLOAT_ARGUMENTS if isinstance(self.arguments.get(n), Tensor)}
        named |= {f"gates.{n}": gate for n, gate in (self.arguments.get("gates") or {}).items()}
        return named

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """A copy with those tensors, named as `tensors()` names them."""
        plain: dict[str, Any] = {n: t for n, t in tensors.items() if not n.startswith("gates.")}
        gates = {n.removeprefix("gates."): t for n, t in tensors.items() if n.startswith("gates.")}
        made = self.with_tensors(**plain, **({"gates": gates} if gates else {}))
        object.__setattr__(made, "_known", self._known)  # these tensors decide no visibility
        return made

    def changed(self, change: Any, *names: str) -> Inputs:
        """A copy with `change(x)` for each of its tensors, or for those of these names."""
        tensors = self.tensors()
        return self.rebuilt({n: change(tensors[n]) for n in names or tensors})

    def take(self, **index: Sequence[int] | Tensor) -> Inputs:
        """The request with those items (`b`), query heads (`h`), key/value heads (`c`), queries (`q`) or keys (`k`).

        Indices of queries and keys are taken as they are: masks and biases go with them, while positions, and what reads them, are those
        of the new order.
        """

        def cut(name: str, x: Any) -> Any:
            if name == "segments":
                return taken("query_segments", x[0], index), taken("key_segments", x[1], index)
            if name == "gates":
                return {gate: taken(f"gates.{gate}", rate, index) for gate, rate in x.items()}
            if name in ("mask_mod", "score_mod"):
                return _of_taken(x, name, index.get("b"), index.get("h"))
            return taken(name, x, index) if isinstance(x, Tensor) else x

        main: dict[str, Any] = {n: taken(n, getattr(self, n), index) for n in MAIN}
        return replace(self, **main, arguments={n: cut(n, x) for n, x in self.arguments.items()})

    def mapped(self, change: Any) -> Inputs:
        """A copy with `change(x)` for every tensor, masks, lengths and ids included."""
        main = {n: change(getattr(self, n)) for n in MAIN}
        return replace(self, **main, arguments={n: map_tensors(x, change) for n, x in self.arguments.items()})


def _of_taken(call: Any, name: str, items: Any, heads: Any) -> Any:
    """A mask_mod or score_mod that is given the items and heads of the whole, where a call has some of them."""

    def whole(numbers: Any, i: Any) -> Any:
        if numbers is None:
            return i
        return torch.as_tensor(numbers, device=i.device)[i] if isinstance(i, Tensor) else int(numbers[i])

    if name == "mask_mod":
        return lambda b, h, q, k: call(whole(items, b), whole(heads, h), q, k)
    return lambda score, b, h, q, k: call(score, whole(items, b), whole(heads, h), q, k)


def map_tensors(x: Any, change: Any) -> Any:
    """`change(x)` of a tensor, and of the tensors in tuples and mappings; other values as they are."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, tuple):
        return tuple(map_tensors(part, change) for part in x)
    return {name: map_tensors(part, change) for name, part in x.items()} if isinstance(x, dict) else x


def draw(case: Case, variant: Any) -> Inputs:
    """The tensors of `case` for `variant`: seeded, drawn in float64 and cast, so dtypes share their numbers.

    For recurrences (and whatever else reads gates) keys have unit length, as their papers have it: the delta rule
    diverges where beta |k|^2 exceeds 2.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    dtype, device = getattr(torch, case.dtype), torch.device(case.device)
    query = normal(generator, case.batch, case.num_heads, case.query_length, case.head_dim)
    key = normal(generator, case.batch, case.num_kv_heads, case.key_length, case.key_dim)
    value = normal(generator, case.batch, case.num_kv_heads, case.key_length, case.value_dim)
    if getattr(variant, "family", "") == "recurrent" or getattr(variant, "gates", None):
        key = torch.nn.functional.normalize(key, dim=-1)
    arguments: dict[str, Any] = {}
    chosen = [feature(label) for label in case.features]
    for one in chosen:
        if one.build is not None:
            arguments |= one.build(case, generator)
    positional = arguments.get("causal") or arguments.get("window") is not None
    if positional and case.query_length != case.key_length:
        arguments.setdefault("offset", "bottom_right")
    gates = draw_gates(variant, case, generator)
    if gates:
        arguments["gates"] = gates
    for one in chosen:
        if one.contents is not None:
            query, key, value = one.contents(case, query, key, value)
    whole = Inputs(case, query, key, value, arguments)
    whole = whole.mapped(lambda x: x.to(device, dtype if x.dtype.is_floating_point else None))
    for layout in [one.layout for one in chosen if one.layout is not None]:
        whole = whole.changed(layout, *MAIN)
    return whole


def draw_gates(variant: Any, case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """One tensor in range for every gate that the variant declares."""
    gates = {}
    strength = 40.0 if "gates=strong" in case.features else 1e-3 if "gates=weak" in case.features else 1.0
    for name, spec in getattr(variant, "gates", {}).items():
        shape = [case.batch, case.num_kv_heads, case.key_length]
        x = normal(generator, *shape, case.key_dim) if spec.shape.endswith("Dk]") else normal(generator, *shape)
        rate = -strength * torch.nn.functional.softplus(x)
        gates[name] = torch.sigmoid(x + math.log(strength)) if spec.range == "(0,1)" else rate
    return gates


def rows_of(tensor: Tensor, rows: Sequence[int], axis: int = 2) -> Tensor:
    """Those rows of an axis; all of it where the axis is broadcast."""
    index = torch.tensor(rows, device=tensor.device)
    return tensor if tensor.shape[axis] == 1 else tensor.index_select(axis, index)


def parameters_of(variant: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state_dict as detached tensors of `dtype` (integers stay)."""
    return {
        name: x.detach().to(dtype) if x.dtype.is_floating_point else x.detach()
        for name, x in variant.state_dict().items()
    }


def has_definition(variant: Any) -> bool:
    """Whether a free function, rather than the variant's own methods, defines the right answer."""
    try:
        definition_of(variant)
    except PluginError:
        return False
    return True


def defining(variant: Any) -> Definition:
    """The definition of `variant`, or its family's formula around its own methods; `NotApplicable` without either."""
    if has_definition(variant):
        return definition_of(variant)
    machinery = machinery_of(variant)
    if machinery is None:
        raise NotApplicable(
            f"formula unverified: {variant.formula or type(variant).__name__} has no definition to compare with"
        )
    return machinery


def require_served(variant: Any, inputs: Inputs) -> None:
    """`UnsupportedRequest` where the variant's own `supports` refuses this call."""
    from attnlab.interface import Attention

    if not isinstance(variant, Attention) or not variant._examines:
        return
    (batch, heads, queries, query_dim), (_, kv_heads, keys, key_dim) = inputs.query.shape, inputs.key.shape
    names = {n for n, x in inputs.arguments.items() if x is not None and x is not False}
    request = Request.of(
        *({"key_mask" if n == "key_lengths" else n for n in names} & set(ASKABLE)),
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        query_length=queries,
        key_length=keys,
        head_dim=query_dim,
        key_dim=key_dim,
        value_dim=inputs.value.shape[3],
        dtype=inputs.case.dtype,
        device=inputs.query.device.type,
        offset=offset if isinstance(offset := inputs.arguments.get("offset"), int) else 0,
    )
    reasons = variant.supports(request)
    if reasons:
        raise UnsupportedRequest(f"{variant.name} does not support " + "; ".join(map(str, reasons)), reasons)


def define(
    variant: Any,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float64,
    parameters: Mapping[str, Tensor] | None = None,
    visible: Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The definition's answer, with everything cast to `dtype` (and left in the graph).

    rows: of these query rows alone, as what only shows past a kernel's tile (256, 1024, ...) needs lengths at which all
    pairs cost too much; `visible` is of these rows too. `UnsupportedRequest` for what the variant itself refuses:
    definitions need not know its limits.
    """
    require_served(variant, inputs)
    rules = inputs.rules()
    visible = inputs.visible(rows) if visible is None else visible
    where = list(inputs.positions())
    cast = inputs.changed(lambda x: x.to(dtype))
    query = cast.query
    arguments = {n: cast.arguments.get(n) for n in ("scale", "bias", "softcap", "score_mod", "sinks", "gates")}
    arguments["score_mod"] = visibility.score_mod_of(rules, arguments["score_mod"], rows)
    if rows is not None:
        query, where[0] = rows_of(query, rows), rows_of(where[0], rows, 1)
        arguments["bias"] = None if arguments["bias"] is None else rows_of(arguments["bias"], rows)
    # A definition may draw too, in the variant's order: then it is held to the same numbers.
    with seeded_draws(inputs.case.seed, inputs.case.device) if draws_freely(variant) else nullcontext():
        return defining(variant)(
            query,
            cast.key,
            cast.value,
            visible=visible.to(cast.query.device),
            parameters=parameters_of(variant, dtype) if parameters is None else parameters,
            options=variant.options,
            positions=tuple(where),
            **arguments,
        )


def reduction_terms(case: Case) -> int:
    """n of tolerances: the lengths of all sums of a forward and its backward, and 16 single steps."""
    widths = case.head_dim + case.key_dim + case.value_dim
    return widths + 2 * case.query_length + 2 * case.key_length + 16


def gradient_terms(case: Case, gradient: Tensor) -> int:
    """The same for a gradient: one with fewer than four axes, a parameter's, is a sum over the batch too."""
    return reduction_terms(case) * (case.batch if gradient.dim() < 4 else 1)


def attended(variant: Any, inputs: Inputs) -> Tensor:
    """Rows `[B, Hq, Lq]` that take any weight: a key is visible, and the normaliser is not 0 (relu features may be)."""
    visible = inputs.visible()
    try:
        with torch.no_grad():
            weights = define(variant, inputs, visible=visible).get("weights")
    except NotApplicable:
        weights = None
    return visible.any(dim=-1) if weights is None else (weights != 0).any(dim=-1)
