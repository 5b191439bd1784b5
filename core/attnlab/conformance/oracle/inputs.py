"""The tensors of a case, the variant's answer to them, and the definition's. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.tolerances import Bound, bound, largest
from attnlab.conformance.oracle import visibility
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.draws import draws_freely, require_exact, require_served, seeded_draws
from attnlab.conformance.oracle.features import FEATURES, normal
from attnlab.conformance.oracle.machinery import machinery_of
from attnlab.conformance.running.check import NotApplicable
from attnlab.errors import PluginError
from attnlab.formulas import Definition, definition_of

FLOAT_ARGUMENTS = ("bias", "sinks")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one call is given. `arguments` are the keyword arguments of `Attention.forward`."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def run(self, variant: Any, **more: Any) -> Any:
        """The variant's `AttentionOutput`; `more` are further arguments. Where it may draw, it draws from one seed."""
        fixed = draws_freely(variant) and not more.get("dropout_p")
        with seeded_draws(self.case.seed, self.case.device) if fixed else nullcontext():
            return variant(self.query, self.key, self.value, **{**self.arguments, **more})

    def with_tensors(self, **tensors: Any) -> Inputs:
        """A copy with other query, key, value, or arguments by name."""
        main = {name: tensors.pop(name) for name in ("query", "key", "value") if name in tensors}
        return replace(self, **main, arguments={**self.arguments, **tensors})

    def rules(self) -> visibility.Rules:
        """Who may see whom, as the scalar predicate reads it."""
        return visibility.Rules.of(
            batch=self.query.shape[0],
            heads=self.query.shape[1],
            queries=self.query.shape[2],
            keys=self.key.shape[2],
            **{k: v for k, v in self.arguments.items() if k in visibility.Rules.__dataclass_fields__},
        )

    def visible(self) -> Tensor:
        """Bool `[B, Hq, Lq, Lk]`, on the case's device."""
        return visibility.dense(self.rules()).to(self.query.device)

    def tensors(self) -> dict[str, Tensor]:
        """Every differentiable tensor of the call by name; gates as `gates.beta`."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        named |= {n: self.arguments[n] for n in FLOAT_ARGUMENTS if isinstance(self.arguments.get(n), Tensor)}
        named |= {f"gates.{n}": gate for n, gate in (self.arguments.get("gates") or {}).items()}
        return named

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> Inputs:
        """A copy with those tensors, named as `tensors()` names them."""
        plain = {n: t for n, t in tensors.items() if not n.startswith("gates.")}
        gates = {n.removeprefix("gates."): t for n, t in tensors.items() if n.startswith("gates.")}
        if gates:
            plain["gates"] = gates  # type: ignore[assignment]
        return self.with_tensors(**plain)


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
    for label in case.features:
        build = FEATURES[label].build
        if build is not None:
            arguments |= build(case, generator)
    positional = arguments.get("causal") or arguments.get("window") is not None
    if positional and case.query_length != case.key_length:
        arguments.setdefault("offset", "bottom_right")
    gates = draw_gates(variant, case, generator)
    if gates:
        arguments["gates"] = gates
    cast = {name: _placed(x, dtype, device) for name, x in arguments.items()}
    q, k, v = (x.to(device, dtype) for x in (query, key, value))
    return Inputs(case, q, k, v, cast)


def draw_gates(variant: Any, case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """One tensor in range for every gate that the variant declares."""
    gates = {}
    for name, spec in getattr(variant, "gates", {}).items():
        shape = [case.batch, case.num_kv_heads, case.key_length]
        x = normal(generator, *shape, case.key_dim) if spec.shape.endswith("Dk]") else normal(generator, *shape)
        gates[name] = torch.sigmoid(x) if spec.range == "(0,1)" else -torch.nn.functional.softplus(x)
    return gates


def _placed(x: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x.to(device, dtype if x.dtype.is_floating_point else None)
    if isinstance(x, tuple):
        return tuple(_placed(part, dtype, device) for part in x)
    if isinstance(x, dict):
        return {name: _placed(part, dtype, device) for name, part in x.items()}
    return x


def parameters_of(variant: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state_dict as detached tensors of `dtype` (integers stay)."""
    return {
        name: x.detach().to(dtype) if x.dtype.is_floating_point else x.detach()
        for name, x in variant.state_dict().items()
    }


def has_definition(variant: Any) -> bool:
    """Whether a free function says what is right, rather than the variant's own methods."""
    try:
        definition_of(variant)
    except PluginError:
        return False
    return True


def judging(variant: Any) -> Definition:
    """What judges `variant`: its definition, or its family's formula around its own methods, or nothing at all."""
    if has_definition(variant):
        return definition_of(variant)
    machinery = machinery_of(variant)
    if machinery is None:
        raise NotApplicable(
            f"formula unverified: {variant.formula or type(variant).__name__} has no definition to compare with"
        )
    return machinery


def define(
    variant: Any,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float64,
    parameters: Mapping[str, Tensor] | None = None,
    visible: Tensor | None = None,
) -> dict[str, Tensor]:
    """The definition's answer, with everything cast to `dtype` (and left in the graph).

    `UnsupportedRequest` for what the variant itself refuses: definitions need not know its limits.
    """
    require_served(variant, inputs)
    rules = inputs.rules()
    seen = visibility.dense(rules) if visible is None else visible
    where = visibility.positions(rules)
    cast = inputs.rebuilt({name: x.to(dtype) for name, x in inputs.tensors().items()})
    arguments = {n: cast.arguments.get(n) for n in ("scale", "bias", "softcap", "score_mod", "sinks", "gates")}
    arguments["score_mod"] = visibility.score_mod_of(rules, arguments["score_mod"])
    # A definition may draw too, in the variant's order: then it is held to the same numbers.
    with seeded_draws(inputs.case.seed, inputs.case.device) if draws_freely(variant) else nullcontext():
        return judging(variant)(
            cast.query,
            cast.key,
            cast.value,
            visible=seen.to(cast.query.device),
            parameters=parameters_of(variant, dtype) if parameters is None else parameters,
            options=variant.options,
            positions=tuple(p.to(cast.query.device) for p in where),
            **arguments,
        )


def plain_dtype(dtype: str) -> str:
    """The dtype in which the plain formula's error is measured (see tolerances)."""
    return "float32" if dtype == "float64" else dtype


def reduction_terms(case: Case) -> int:
    """n of tolerances: the lengths of all sums of a forward and its backward, and 16 single steps."""
    widths = case.head_dim + case.key_dim + case.value_dim
    return widths + 2 * case.query_length + 2 * case.key_length + 16


def exact_and_bound(variant: Any, inputs: Inputs, what: str = "out") -> tuple[Tensor, Bound]:
    """The float64 answer named `what` ("out", "weights" or "lse") and the bound on errors against it.

    `NotApplicable` for a variant that is random or gives up `exact`.
    """
    require_exact(variant, inputs)
    return defined_and_bound(variant, inputs, what)


def defined_and_bound(variant: Any, inputs: Inputs, what: str = "out") -> tuple[Tensor, Bound]:
    """`exact_and_bound` without asking whether the variant claims `exact`."""
    case = inputs.case
    visible = inputs.visible()
    with torch.no_grad():
        exact = define(variant, inputs, visible=visible)[what]
        low = plain_dtype(case.dtype)
        plain = define(variant, inputs, dtype=getattr(torch, low), visible=visible)[what]
    # What is averaged: values for out; weights lie in [0, 1]; lse moves with the scores, of which it is a maximum.
    magnitude = {"out": largest(inputs.value), "weights": 1.0, "lse": 1.0}[what]
    return exact, bound(
        case.dtype, exact=exact, plain=plain, plain_dtype=low, terms=reduction_terms(case), magnitude=magnitude
    )


def attended(variant: Any, inputs: Inputs) -> Tensor:
    """Rows `[B, Hq, Lq]` that take any weight: they see a key, and the normaliser is not 0 (relu features may be)."""
    visible = inputs.visible()
    try:
        with torch.no_grad():
            weights = define(variant, inputs, visible=visible).get("weights")
    except NotApplicable:
        weights = None
    return visible.any(dim=-1) if weights is None else (weights != 0).any(dim=-1)
