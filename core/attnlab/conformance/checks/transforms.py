"""torch.func: parameters that come from outside, gradients by transform, a batch axis by vmap. Needs torch.

No capability says that a variant can be transformed: torch refuses what it cannot transform (an autograd.Function of the old
form, say), and then there is nothing to judge. What it does transform must be right.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.compare.comparer import drawn, short
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import differentiated, direction_for, trained
from attnlab.conformance.oracle.inputs import draw
from attnlab.conformance.oracle.seeds import seeded_draws
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.conformance.running.subject import like
from attnlab.errors import AttnlabError


def check_parameters_are_read_at_each_call(variant: Any, case: Case) -> None:
    """Other parameters by functional_call, by an update in place or by load_state_dict give the answer that belongs to them."""
    if not dict(variant.named_parameters()):
        raise NotApplicable("it has no parameters")
    inputs, compare = drawn(case, variant)
    inputs.seeded_out(variant)  # whatever a first call would keep is kept now
    others = _moved(variant, case)
    with seeded_draws(case.seed, case.device):
        holder = like(variant).to(inputs.query.device, inputs.query.dtype)
    holder.load_state_dict(others)
    expected = inputs.seeded_out(holder)
    changed, assigned = copy.deepcopy(variant), copy.deepcopy(variant)
    for one in (changed, assigned):
        inputs.seeded_out(one)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            parameter.copy_(others[name])
    assigned.load_state_dict(others, assign=True)
    for way, call in (
        ("torch.func.functional_call", _functional(variant, others)),
        ("an update in place, as an optimizer's", changed),
        ("load_state_dict(assign=True)", assigned),
    ):
        versus = f"a module's that holds the same parameters (given by {way})"
        advice = "Read parameters as self.name in each call: keep no projection, copy or list of them"
        compare.same(inputs.seeded_out(call), expected, versus, advice)


def check_functional_gradients_agree(variant: Any, case: Case) -> None:
    """torch.func.grad over inputs and parameters gives the gradients of autograd."""
    inputs, compare = drawn(case, variant)
    direction = direction_for(inputs)
    expected = differentiated(variant, inputs)

    def weighed(tensors: dict[str, Tensor], parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = inputs.rebuilt(tensors).run(_functional(variant, parameters)).out
        return (out * direction).sum(), out

    parameters = {n: p.detach().clone() for n, p in trained(variant).items()}
    with seeded_draws(case.seed, case.device):
        (by_input, by_parameter), out = _transformed(
            lambda: torch.func.grad(weighed, argnums=(0, 1), has_aux=True)(inputs.tensors(), parameters)
        )
    advice = (
        "Compute from the tensors that the call is given: no .data, no detach(), no second reference to a parameter"
    )
    compare.same_answer((out, {**by_input, **by_parameter}), expected, "autograd's", advice)


def check_vmap_equals_a_loop(variant: Any, case: Case) -> None:
    """torch.func.vmap over one more axis, wherever it lies and whoever has it, gives what a loop over it gives."""
    inputs, compare = drawn(case, variant)
    inputs.seeded_out(variant)  # what is refused is refused here
    # As many as the batch has items: an axis that is taken for another one then fits, and shows.
    mates = [draw(replace(case, seed=case.seed + 40 + n), variant).tensors() for n in range(case.batch)]
    own = inputs.tensors()
    advice = "A vmap rule must move each operand's mapped axis by in_dims, and None means that it has none"
    for words, axes in (
        ("first for all", dict.fromkeys(own, 0)),
        ("last for query, second for key, none for value", dict.fromkeys(own, 0) | _SPREAD),
        ("only value's, third", dict.fromkeys(own) | {"value": 2}),
    ):
        stacked = {n: own[n] if at is None else torch.stack([m[n] for m in mates], dim=at) for n, at in axes.items()}
        alone = [inputs.rebuilt({n: own[n] if axes[n] is None else m[n] for n in own}) for m in mates]
        mapped = torch.func.vmap(lambda tensors: inputs.rebuilt(tensors).run(variant).out, in_dims=(axes,))
        with torch.no_grad():
            got = _transformed(lambda mapped=mapped, stacked=stacked: mapped(stacked))  # type: ignore[misc]
        for n, call in enumerate(alone):
            compare.same(got[n], call.out(variant), f"that of a loop, at item {n} of the mapped axis ({words})", advice)


_SPREAD: dict[str, int | None] = {"query": 4, "key": 1, "value": None}


def _moved(variant: Any, case: Case) -> dict[str, Tensor]:
    """The state_dict with every parameter stretched by a factor of its own, from 1 to 1.5 (signs stay)."""
    generator = torch.Generator().manual_seed(case.seed + 23)
    moved = {n: x.detach().clone() for n, x in variant.state_dict().items()}
    for name, parameter in variant.named_parameters():
        factors = 1 + 0.5 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        moved[name] = parameter.detach() * factors.to(parameter.device, parameter.dtype)
    return moved


def _functional(variant: Any, parameters: dict[str, Tensor]) -> Callable[..., Any]:
    def call(*tensors: Tensor, **arguments: Any) -> Any:
        return torch.func.functional_call(variant, parameters, tensors, arguments)

    return call


def _transformed(run: Callable[[], Any]) -> Any:
    """The result, or `NotApplicable` where torch cannot transform this code: the same call went through without."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a missing batching rule, for which a loop stands in: only slow
            return run()
    except AttnlabError:
        raise
    except Exception as refusal:
        raise NotApplicable(f"torch.func cannot transform it: {short(refusal, 200)}") from None


def _with_parameters(scope: Scope) -> Iterable[Case]:
    return scope.usable(*(("",) if scope.quick else ("", "causal+gqa+key_mask_left")))


def _gradients(scope: Scope) -> Iterable[Case]:
    more = () if scope.quick else ("", "mask+bias+sinks+key_mask_left")
    return scope.usable("causal+gqa", *more, needs=("backward",))


def _mapped(scope: Scope) -> Iterable[Case]:
    return scope.usable(*(("",) if scope.quick else ("", "causal+key_mask_left+gqa")))


CHECKS = (
    Check(check_parameters_are_read_at_each_call, "transforms", _with_parameters, random_too=True),
    Check(check_functional_gradients_agree, "transforms", _gradients, random_too=True, slow=True),
    Check(check_vmap_equals_a_loop, "transforms", _mapped),
)
