"""Batch mates, other heads, grouped heads, modes and repetition change nothing. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.capabilities import DTYPES
from attnlab.conformance.checks._runs import declared
from attnlab.conformance.compare.messages import demand, demand_close
from attnlab.conformance.compare.tolerances import Bound, largest, rounding_bound
from attnlab.conformance.oracle.cases import Case, case
from attnlab.conformance.oracle.derivatives import direction_for, gradients
from attnlab.conformance.oracle.inputs import Inputs, draw, reduction_terms
from attnlab.conformance.running.check import Check, NotApplicable, Scope
from attnlab.conformance.running.subject import like
from attnlab.errors import UnsupportedRequest


def check_batch_items_are_independent(variant: Any, case: Case) -> None:
    """Each item's output is the same alone, and beside mates that hold something else."""
    inputs = draw(case, variant)
    other = draw(replace(case, seed=case.seed + 9), variant)
    with torch.no_grad():
        together = inputs.run(variant).out
        for b in range(case.batch):
            alone = item(inputs, b).run(variant).out
            _agree(
                variant,
                inputs,
                alone[0],
                together[b],
                f"item {b} in the batch of {case.batch}",
                "A reshape or a broadcast mixes items: keep the batch axis first and index batch * H + h",
            )
            mixed = _mixed(inputs, other, b)
            beside = mixed.run(variant).out
            _agree(
                variant,
                inputs,
                beside[b],
                together[b],
                f"item {b} beside other mates",
                "Look for sums or maxima over the batch axis",
            )


def check_batch_items_are_bitwise_independent(variant: Any, case: Case) -> None:
    """Where claimed: each item's bits do not depend on its mates."""
    inputs = draw(case, variant)
    with torch.no_grad():
        together = inputs.run(variant).out
        for b in range(case.batch):
            alone = item(inputs, b).run(variant).out
            demand(
                bool(torch.equal(alone[0], together[b])),
                variant,
                case,
                f"item {b} alone differs in its bits from item {b} in the batch",
                "Drop the claim `batch_invariant`, or choose tiles and reduction orders independently of the batch",
            )


def check_heads_are_independent(variant: Any, case: Case) -> None:
    """A head's output depends on its own query head and its key/value head only."""
    inputs = draw(case, variant)
    other = draw(replace(case, seed=case.seed + 9), variant)
    group = case.num_heads // case.num_kv_heads
    with torch.no_grad():
        before = inputs.run(variant).out
        for h in range(case.num_heads):
            kv = h // group
            keep = torch.arange(case.num_heads, device=case.device).view(1, -1, 1, 1) == h
            keep_kv = torch.arange(case.num_kv_heads, device=case.device).view(1, -1, 1, 1) == kv
            changed = inputs.with_tensors(
                query=torch.where(keep, inputs.query, other.query),
                key=torch.where(keep_kv, inputs.key, other.key),
                value=torch.where(keep_kv, inputs.value, other.value),
                **_of_other_heads(inputs, other, h),
            )
            after = changed.run(variant).out
            _agree(
                variant,
                inputs,
                after[:, h],
                before[:, h],
                f"head {h} before the other heads were changed",
                "Query head h reads key/value head h // (Hq // Hkv) and nothing else. Where heads mix by design, declare "
                "known_failures = {'heads_are_independent': KnownFailure(reason)}",
            )


def _of_other_heads(inputs: Inputs, other: Inputs, h: int) -> dict[str, Tensor]:
    """Masks, biases and sinks that differ by head: those of `other` but in head `h`."""
    named = {}
    for n in ("mask", "bias", "sinks"):
        x = inputs.arguments.get(n)
        if isinstance(x, Tensor) and (n == "sinks" or (x.dim() == 4 and x.shape[1] > 1)):
            keep = torch.arange(inputs.query.shape[1], device=x.device) == h
            keep = keep if n == "sinks" else keep.view(1, -1, 1, 1)
            named[n] = torch.where(keep, x, other.arguments[n])
    return named


def check_grouped_heads_equal_repeated_heads(variant: Any, case: Case) -> None:
    """Hkv heads give the same output as those heads repeated: k0, k0, k1, k1."""
    inputs = draw(case, variant)
    group = case.num_heads // case.num_kv_heads
    try:
        full = like(variant, num_kv_heads=case.num_heads)
    except UnsupportedRequest as refusal:
        raise NotApplicable(f"it cannot be made with a key/value head for each query head: {refusal}") from None
    mine, theirs = variant.state_dict(), full.state_dict()
    if any(theirs[n].shape != x.shape for n, x in mine.items()) or len(mine) != len(theirs):
        raise NotApplicable("its parameters depend on the number of key/value heads, so the two cannot share them")
    named = {
        n: x.repeat_interleave(group, dim=1) if n in ("key", "value") or n.startswith("gates.") else x
        for n, x in inputs.tensors().items()
    }
    full = full.to(inputs.query.device, inputs.query.dtype)
    _require_equal_constants(variant, full)
    with torch.no_grad():
        grouped = inputs.run(variant).out
        repeated = inputs.rebuilt(named).run(full).out
    _agree(
        variant,
        inputs,
        grouped,
        repeated,
        "the call with key and value heads repeated",
        "Query head h reads key/value head h // (Hq // Hkv): repeat_interleave, not repeat",
    )


def _require_equal_constants(variant: Any, full: Any) -> None:
    """`NotApplicable` where what the two were made with differs: numbers by key/value head, or numbers drawn in `__init__`."""
    mine, theirs = (
        {n: x for n, x in _constants(made).items() if n.rpartition(".")[2] != "num_kv_heads"}
        for made in (variant, full)
    )
    for name, x in mine.items():
        y = theirs.get(name)
        alike = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        if not alike:
            raise NotApplicable(
                f"its constant {name!r} depends on the number of key/value heads or is drawn anew for each instance, so the "
                "two compute with other numbers"
            )


def _constants(made: torch.nn.Module) -> dict[str, Any]:
    """Buffers, plain tensors and plain numbers of a module and its children, by name."""
    found: dict[str, Any] = dict(made.named_buffers())
    for path, module in made.named_modules():
        for name, x in vars(module).items():
            numbers = isinstance(x, (list, tuple)) and all(isinstance(part, (bool, int, float)) for part in x)
            if not name.startswith("_") and (numbers or isinstance(x, (Tensor, int, float))):
                found[f"{path}.{name}" if path else name] = x
    return found


def check_modes_agree(variant: Any, case: Case) -> None:
    """train and eval, with and without gradients, inference mode: one answer (no dropout is asked for)."""
    inputs = draw(case, variant)
    was = variant.training
    answers: dict[str, Tensor] = {}
    try:
        for training in (False, True):
            variant.train(training)
            word = "train" if training else "eval"
            with torch.no_grad():
                answers[f"{word}, no_grad"] = inputs.run(variant).out
            with torch.inference_mode():
                answers[f"{word}, inference_mode"] = inputs.run(variant).out.clone()
            if variant.capabilities.backward:
                recorded = {n: x.clone().requires_grad_() for n, x in inputs.tensors().items()}
                with torch.enable_grad():
                    answers[f"{word}, grad"] = inputs.rebuilt(recorded).run(variant).out.detach()
        slopes: dict[bool, dict[str, Tensor]] = {}
        if variant.capabilities.backward and not case.features:
            for training in (False, True):
                variant.train(training)
                slopes[training] = gradients(variant, inputs, direction_for(inputs))[1]
        variant.eval()
        with torch.no_grad():
            answers["eval, no_grad, after training"] = inputs.run(variant).out
    finally:
        variant.train(was)
    first, expected = next(iter(answers.items()))
    for mode, got in answers.items():
        _agree(
            variant,
            inputs,
            got,
            expected,
            f"{first} (this is {mode})",
            "Choose code paths from the Request alone; dropout only where dropout_p is given",
        )
    for name, expected in slopes.get(False, {}).items():
        size = max(largest(expected), largest(direction_for(inputs)) * largest(inputs.value))
        demand_close(
            slopes[True][name],
            expected,
            rounding_bound(case.dtype, terms=reduction_terms(case) * case.batch, magnitude=size),
            variant,
            case,
            what=f"gradient of {name}",
            versus="that in eval mode (this is train)",
            advice="train() and eval() change dropout and nothing else, backward too",
        )


def check_repetition_gives_the_same_bits(variant: Any, case: Case) -> None:
    """Where claimed: the same inputs give the same bits, forward and backward."""
    inputs = draw(case, variant)
    if variant.capabilities.backward:
        direction = direction_for(inputs)
        out, first = gradients(variant, inputs, direction)
        again, second = gradients(variant, inputs, direction)
        pairs = {"out": (out, again), **{f"gradient of {n}": (first[n], second[n]) for n in first}}
    else:
        with torch.no_grad():
            pairs = {"out": (inputs.run(variant).out, inputs.run(variant).out)}
    for what, (a, b) in pairs.items():
        demand(
            bool(torch.equal(a, b)),
            variant,
            case,
            f"{what} differs between two identical calls",
            "Drop the claim `deterministic`, or seed and order the computation",
        )


def check_earlier_calls_leave_no_trace(variant: Any, case: Case) -> None:
    """A call gives what a fresh copy gives, after calls of other lengths, contents and dtypes, and on tensors written anew."""
    first = draw(case, variant)
    second = draw(replace(case, seed=case.seed + 21), variant)
    calls = [("the first call", first), ("a call of the same shape and other contents", second)]
    calls += [(f"calls of other lengths and dtypes ({one.case.id})", one) for one in _other_calls(variant, case)]
    calls += [("many calls", second), ("more of them", first)]
    with torch.no_grad():
        fresh = [one.run(copy.deepcopy(variant)).out for _, one in calls]
        reused = _copied(first)
        reused.run(variant)
        _write(reused, second)
        calls.append(("a call on the same tensors, written anew", replace(reused, case=second.case)))
        fresh.append(fresh[1])
        for (when, one), expected in zip(calls, fresh, strict=True):
            _agree(
                variant,
                one,
                one.run(variant).out,
                expected,
                f"a fresh copy's (this is after {when})",
                "Keep nothing of a call in the module: what is kept belongs to one shape, dtype, content or parameter, and "
                "must be keyed by it",
            )


def _copied(inputs: Inputs) -> Inputs:
    """The call with every tensor copied, masks and lengths included."""

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.clone()
        if isinstance(x, tuple):
            return tuple(copied(part) for part in x)
        return {n: copied(part) for n, part in x.items()} if isinstance(x, dict) else x

    arguments = {n: copied(x) for n, x in inputs.arguments.items()}
    return Inputs(inputs.case, inputs.query.clone(), inputs.key.clone(), inputs.value.clone(), arguments)


def _write(into: Inputs, source: Inputs) -> None:
    """Every tensor of `into` written over, in place, with that of `source`."""

    def write(x: Any, y: Any) -> None:
        if isinstance(x, Tensor):
            x.copy_(y)
        elif isinstance(x, tuple):
            for one, other in zip(x, y, strict=True):
                write(one, other)
        elif isinstance(x, dict):
            for name in x:
                write(x[name], y[name])

    write(
        {"query": into.query, "key": into.key, "value": into.value, **into.arguments},
        {"query": source.query, "key": source.key, "value": source.value, **source.arguments},
    )


def _other_calls(variant: Any, case: Case) -> Iterable[Inputs]:
    for more, batch in ((6, case.batch), (0, 1), (1, 1)):
        longer = replace(case, query_length=case.query_length + more, key_length=case.key_length + more)
        yield draw(replace(longer, batch=batch, seed=case.seed + 5), variant)
    for dtype in DTYPES:
        if variant.parameter_free and dtype in variant.capabilities.dtypes and dtype != case.dtype:
            yield draw(replace(case, dtype=dtype), variant)


def item(inputs: Inputs, b: int) -> Inputs:
    """The call on batch item `b` alone."""
    size = inputs.query.shape[0]

    def cut(name: str, x: Any) -> Any:
        if isinstance(x, tuple) and name == "segments":
            return tuple(cut("ids", part) for part in x)
        if isinstance(x, dict):
            return {n: cut("gate", part) for n, part in x.items()}
        if name == "score_mod":
            return lambda score, i, *where: x(score, i + b, *where)
        if name == "mask_mod":
            return lambda i, *where: x(i + b, *where)
        if isinstance(x, Tensor) and name not in ("sinks",) and not (name == "mask" and x.dim() == 2):
            return x[b : b + 1] if x.dim() and x.shape[0] == size else x
        return x

    arguments = {n: cut(n, x) for n, x in inputs.arguments.items()}
    main = {n: getattr(inputs, n)[b : b + 1] for n in ("query", "key", "value")}
    return inputs.with_tensors(**main, **arguments)


def _mixed(inputs: Inputs, other: Inputs, b: int) -> Inputs:
    """Item `b` beside mates with other contents, and with other masks, lengths, offsets and biases where those differ by item."""
    size = inputs.query.shape[0]

    def mix(name: str, x: Any, y: Any) -> Any:
        if isinstance(x, tuple) and name == "segments":
            return tuple(mix(name, one, two) for one, two in zip(x, y, strict=True))
        if isinstance(x, dict):
            return {n: mix("gate", part, y[n]) for n, part in x.items()}
        per_item = isinstance(x, Tensor) and x.dim() and x.shape[0] == size and name != "sinks"
        if not per_item or (name == "mask" and x.dim() == 2):
            return x
        if name in ("query", "value"):
            y = 10 * y
        elif torch.equal(x, y):  # lengths and offsets are no random numbers: the mates exchange theirs
            y = x.roll(1, dims=0)
        return torch.where(torch.arange(size, device=x.device).view(-1, *[1] * (x.dim() - 1)) == b, x, y)

    main = {n: mix(n, getattr(inputs, n), getattr(other, n)) for n in ("query", "key", "value")}
    return inputs.with_tensors(**main, **{n: mix(n, x, other.arguments[n]) for n, x in inputs.arguments.items()})


def _agree(variant: Any, inputs: Inputs, got: Tensor, expected: Tensor, versus: str, advice: str) -> None:
    case = inputs.case
    limit: Bound = rounding_bound(
        case.dtype, terms=reduction_terms(case), magnitude=max(largest(expected), largest(inputs.value))
    )
    demand_close(got, expected, limit, variant, case, what="out", versus=versus, advice=advice)


def _batches(scope: Scope) -> Iterable[Case]:
    labels = (
        "causal",
        "batch_offset",
        "key_mask_left",
        "key_lengths",
        "segments",
        "mask_per_item",
        "mask_of_each",
        "mask_mod",
        "bias_per_key",
        "bias_of_each",
        "score_mod",
        "gqa",
    )
    for label in ((), *((x,) for x in labels)):
        yield case(*label, dtype=scope.base, batch=3)
    yield case("query_lengths", "key_lengths", dtype=scope.base, batch=5)
    yield case("key_mask_left", dtype=scope.base, batch=5)


def _heads(scope: Scope) -> Iterable[Case]:
    yield case(dtype=scope.base, num_heads=3, num_kv_heads=3)
    yield case("gqa", dtype=scope.base)
    yield case("causal", "gqa", dtype=scope.base)
    for label in ("mask_per_head", "mask_of_each", "bias", "bias_of_each", "sinks", "mask_mod", "score_mod"):
        yield case(label, dtype=scope.base, num_heads=3, num_kv_heads=3)


def _groups(scope: Scope) -> Iterable[Case]:
    for labels in (
        ("gqa",),
        ("multi_query",),
        ("gqa", "causal"),
        ("gqa", "key_mask_left"),
        ("gqa", "value_dim"),
        ("gqa", "mask_per_head"),
        ("gqa", "bias", "sinks"),
    ):
        yield case(*labels, dtype=scope.base)
    yield case(dtype=scope.base, num_heads=6, num_kv_heads=2, note="groups of 3")


def _modes(scope: Scope) -> Iterable[Case]:
    for labels in ((), ("causal",), ("mask",), ("key_mask_left",), ("gqa",)):
        yield case(*labels, dtype=scope.base)
    yield case(*declared(scope, "window", "bias", "softcap", "sinks"), dtype=scope.base)
    yield case("causal", dtype=scope.base, query_length=70, key_length=70)


def _repeated(scope: Scope) -> Iterable[Case]:
    """In each dtype: kernels differ, and a first call may take another path than those after it."""
    yield from _modes(scope)
    yield from (case(dtype=d) for d in scope.dtypes if d != scope.base)


CHECKS = (
    Check(check_batch_items_are_independent, "independence", _batches),
    Check(check_batch_items_are_bitwise_independent, "independence", _batches, claims=("batch_invariant",)),
    Check(check_heads_are_independent, "independence", _heads, random_too=True),
    Check(check_grouped_heads_equal_repeated_heads, "independence", _groups),
    Check(check_modes_agree, "independence", _modes, random_too=True),
    Check(check_repetition_gives_the_same_bits, "independence", _repeated, claims=("deterministic",)),
    Check(check_earlier_calls_leave_no_trace, "independence", _modes, random_too=True),
)
