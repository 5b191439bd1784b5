"""What is prepared before a call: `precompute(key)` of score families, and `init_state(initial=)` of recurrences. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from attnlab.conformance.checks._stepping import fresh, step
from attnlab.conformance.checks.decoding import causal_requests
from attnlab.conformance.checks.definition import answers_of_draws
from attnlab.conformance.compare.comparer import DEFINITION, Comparer, drawn
from attnlab.conformance.oracle.cases import Case
from attnlab.conformance.oracle.derivatives import direction_for, gradients, recorded, slopes, trained
from attnlab.conformance.oracle.draws import require_exact
from attnlab.conformance.oracle.inputs import Inputs, draw
from attnlab.conformance.running.check import Check, NotApplicable, Scope, precise
from attnlab.errors import InvalidInput


def _by_precomputed_keys(variant: Any, named: bool) -> Callable[..., Any]:
    """The variant's call with keys that are precomputed first; `named`: what is padding is said there too."""
    if not hasattr(variant, "precompute"):
        raise NotApplicable("it has no precompute")

    def run(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
        padding = {n: arguments[n] for n in ("key_mask", "key_lengths") if n in arguments and named}
        return variant.precompute(key, **padding)(query, value, **arguments)

    return run


def check_precomputed_keys_agree_with_definition(variant: Any, case: Case) -> None:
    """Out and gradients through `precompute(key)` are the definition's, whether padding is named there or not."""
    inputs = draw(case, variant)
    require_exact(variant, inputs)
    direction = direction_for(inputs)
    (exact, limit), exact_gradients = answers_of_draws(variant, [inputs], direction, None)
    compare, advice = Comparer(variant, inputs), "Precomputed keys are what project_key makes of keys, in the graph"
    for named in (False, True):
        call = _by_precomputed_keys(variant, named)
        compare.close(inputs.out(call), exact, limit, f"{DEFINITION} (by precompute)", advice)
        if variant.capabilities.backward:
            out, grads = gradients(variant, inputs, direction, call)
            compare.close(out, exact, limit, f"{DEFINITION} (by precompute, recorded)", advice)
            compare.close_gradients(grads, exact_gradients, advice, "the definition's (by precompute)")


def check_precomputed_keys_serve_many_queries(variant: Any, case: Case) -> None:
    """Queries that come one by one to the same precomputed keys get the rows of one call, in any order, and of other items by `reorder`."""
    inputs, compare = drawn(case, variant)
    _by_precomputed_keys(variant, False)
    whole = inputs.out(variant)
    advice = "Keep nothing of a call in precomputed keys"
    with torch.no_grad():
        kept = variant.precompute(inputs.key)
        for row in (case.query_length - 1, 0, case.query_length // 2):
            got = kept(inputs.query[:, :, row : row + 1], inputs.value).out
            compare.same(got, whole[:, :, row : row + 1], "that row of one call", advice)
        order = list(range(case.batch))[::-1]
        moved = kept.reorder(torch.tensor(order, device=inputs.key.device))
        got = moved(inputs.query[order], inputs.value[order]).out
        compare.same(got, whole[order], "the items in that order", "reorder(index) takes the keys of those items")


def check_memories_may_begin_with_any_content(variant: Any, case: Case) -> None:
    """Tokens after `init_state(initial=memory)` get the definition's rows and gradients, whatever the memory's layout; it is a copy."""
    if "initial" not in signature(variant.init_state).parameters:
        raise NotApplicable("its init_state takes no initial memory")
    inputs = draw(case, variant)
    require_exact(variant, inputs)
    start, n = case.query_length // 2, case.query_length
    direction = direction_for(inputs).clone()
    direction[:, :, :start] = 0
    (exact, limit), exact_gradients = answers_of_draws(variant, [inputs], direction, None)
    compare = Comparer(variant, inputs)
    advice = "The initial memory is copied, in the accumulation dtype, and stays in the graph"
    leaves = recorded(inputs.tensors())
    with torch.enable_grad():
        call = inputs.rebuilt(leaves)
        memory = step(variant, call, 0, start, fresh(variant, inputs, None)).state.memory
        strided = memory.transpose(-1, -2).contiguous().transpose(-1, -2)
        out = step(variant, call, start, n, variant.init_state(case.batch, initial=strided)).out
        grads = slopes(out, {**leaves, **trained(variant)}, direction[:, :, start:])
    versus = f"{DEFINITION} (the last {n - start} tokens, after init_state(initial=))"
    compare.close(out.detach(), exact[:, :, start:], limit, versus, advice)
    if variant.capabilities.backward:
        compare.close_gradients(grads, exact_gradients, advice, "the definition's (through the initial memory)")
    with torch.no_grad():
        memory = memory.detach().clone()
        state = variant.init_state(case.batch, initial=memory)
        memory.zero_()
        compare.close(
            step(variant, inputs, start, n, state).out,
            exact[:, :, start:],
            limit,
            f"{versus}, which was written over",
            advice,
        )


def check_what_parameters_made_is_refused_once_they_changed(variant: Any, case: Case) -> None:
    """What `kept_from` names something of is refused after any parameter changed that it was computed from: states, precomputed keys."""
    if not variant.kept_from():
        raise NotApplicable("what it keeps is computed from no parameter, by its own account")
    inputs, compare = drawn(case, variant)

    def made() -> list[tuple[str, Any]]:
        kept: list[tuple[str, Any]] = []
        if variant.capabilities.state:
            kept.append(("a state", step(variant, inputs, 0, 3, fresh(variant, inputs, None)).state))
        if hasattr(variant, "precompute"):
            kept.append(("precomputed keys", variant.precompute(inputs.key)))
        return kept

    with torch.no_grad():
        for name, parameter in trained(variant).items():
            before, now = parameter.clone(), made()
            parameter.add_(torch.ones_like(parameter))
            for (words, old), (_, new) in zip(now, made(), strict=True):
                if not _differ(old, new):
                    continue
                try:
                    _used(variant, inputs, old)
                except InvalidInput:
                    continue
                fault = f"{words} made with another {name} was accepted"
                compare.fail(fault, "Name every parameter and buffer that it is computed from in kept_from()")
            parameter.copy_(before)


def _differ(old: Any, new: Any) -> bool:
    """Whether the tensors of two states, or of two objects with precomputed keys, differ."""
    pairs = [(x, vars(new)[n]) for n, x in vars(old).items() if isinstance(x, Tensor)]
    return any(not torch.equal(x, y) for x, y in pairs)


def _used(variant: Any, inputs: Inputs, kept: Any) -> None:
    if hasattr(kept, "reorder") and callable(kept):
        kept(inputs.query, inputs.value)
    else:
        step(variant, inputs, 3, inputs.case.query_length, kept)


def _prepared(scope: Scope) -> Iterable[Case]:
    yield from scope.cases("", "gqa")
    if scope.family == "score":
        yield from scope.requests("backward", without=("contents",), change=precise, full=40, quick=8, seed=32000)


def _sequences(scope: Scope) -> Iterable[Case]:
    if scope.family == "recurrent":
        yield from scope.cases("causal", "causal+gqa", needs=("state",))
        for one in causal_requests(scope, full=30, quick=6, seed=33000):
            if not {"segments", "segments=turns", "segments=bytes"} & set(one.features):
                yield one


def _plain(scope: Scope) -> Iterable[Case]:
    yield from scope.cases("")
    yield from (
        c
        for c in scope.requests(
            without=tuple(a for a in scope.space.axes if a != "options"), full=12, quick=4, seed=34000
        )
    )


def _crossing(scope: Scope) -> Iterable[Case]:
    return (replace(one, needs=("cross_lengths",)) for one in _plain(scope))


CHECKS = (
    Check(check_precomputed_keys_agree_with_definition, "entrances", _prepared, asks_more=True),
    Check(check_precomputed_keys_serve_many_queries, "entrances", _crossing, claims=("position_free",)),
    Check(check_memories_may_begin_with_any_content, "state", _sequences, asks_more=True),
    Check(check_what_parameters_made_is_refused_once_they_changed, "state", _plain, asks_more=True),
)
